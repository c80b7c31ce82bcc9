"""Faults of a server, injected on demand.

| fault | effect for clients |
|---|---|
| slow | every iteration takes `SLOW_FACTOR` times as long |
| hung | connections are accepted, nothing is ever answered, streams stall |
| http_500 | every route answers 500; work in flight goes on |
| malformed_metrics | `/metrics` is cut off within a line and holds values that are no numbers |
| wedged | `/health` and `/metrics` answer, the engine never finishes an iteration |
| crash | connections break and the port is closed; the fleet starts the server again |
| wake_refused | `/wake_up` answers 500 |
"""

from __future__ import annotations

import enum

SLOW_FACTOR = 5.0


class Fault(enum.StrEnum):
    """Faults by the name the admin API gives them."""

    NONE = "none"
    SLOW = "slow"
    HUNG = "hung"
    HTTP_500 = "http_500"
    MALFORMED_METRICS = "malformed_metrics"
    WEDGED = "wedged"
    CRASH = "crash"
    WAKE_REFUSED = "wake_refused"

    @property
    def stops_engine(self) -> bool:
        """Whether the engine is stalled."""
        return self in (Fault.HUNG, Fault.WEDGED)


def malform(page: str) -> str:
    """A page that a scraper must refuse: bad numbers, then an end within a line."""
    lines = page.splitlines(keepends=True)
    half = lines[: len(lines) // 2]
    running = 'vllm:num_requests_running{engine="0",model_name='
    return "".join(half) + f'{running}"x"}} -1.0\n{running}"y"}} NaN\n{running}"z"}} twelve\n{running}"unfin'
