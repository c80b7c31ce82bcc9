"""What a replay gives: one record per request, and their JSON."""

from __future__ import annotations

import dataclasses
import enum
import gzip
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path


class Outcome(enum.StrEnum):
    """How a request ended for its client. Everything but `OK` is a lost request."""

    OK = "ok"
    HTTP_ERROR = "http_error"
    """An answer with a status other than 200; `detail` has it."""
    STREAM_ERROR = "stream_error"
    """An error event inside the stream."""
    ABORTED = "aborted"
    """`finish_reason: abort`."""
    SHORT = "short"
    """The stream ended, but with fewer tokens than requested, or without its end mark."""
    GARBLED = "garbled"
    """All tokens came, but not the text that this prompt leads to: a reissue went wrong."""
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    NOT_SENT = "not_sent"
    """Too many requests were under way already."""
    UNFINISHED = "unfinished"
    """Still under way when the replay ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. Times are seconds from its planned arrival, so that a late sender does not flatter the server."""

    index: int
    service: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    """Requested."""
    outcome: Outcome
    received_tokens: int = 0
    late_s: float = 0.0
    """How much later than planned the client sent it."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    """Mean time per output token after the first; None for answers of one token."""
    e2e_s: float | None = None
    detail: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayProgress:
    """Progress of a replay."""

    elapsed_s: float
    duration_s: float
    planned: int
    sent: int
    finished: int
    lost: int
    received_tokens: int

    @property
    def in_flight(self) -> int:
        """Sent and not ended."""
        return self.sent - self.finished


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayReport:
    """A whole replay, in order of arrival."""

    records: tuple[RequestRecord, ...]
    duration_s: float
    """Length of the trace's slice."""
    wall_s: float
    """Until the last answer."""
    started_unix_s: float
    stopped: bool = False
    """Ended before its time, on request."""

    @property
    def lost(self) -> tuple[RequestRecord, ...]:
        """Requests without a complete answer."""
        return tuple(record for record in self.records if record.outcome is not Outcome.OK)

    @property
    def outcomes(self) -> dict[str, int]:
        """How many requests ended in which way; only what happened."""
        return dict(sorted(Counter(record.outcome.value for record in self.records).items()))

    @property
    def max_late_s(self) -> float:
        """The client's own largest delay; large means that the client's machine, not the fleet, was the limit."""
        return max((record.late_s for record in self.records), default=0.0)

    def to_json(self) -> dict[str, object]:
        """All of it, with a record a row."""
        return {
            "duration_s": self.duration_s,
            "wall_s": round(self.wall_s, 3),
            "started_unix_s": round(self.started_unix_s, 3),
            "stopped": self.stopped,
            "requests": len(self.records),
            "lost_requests": len(self.lost),
            "outcomes": self.outcomes,
            "max_late_s": round(self.max_late_s, 4),
            "records": [_rounded(dataclasses.asdict(record)) for record in self.records],
        }

    def write(self, path: Path) -> None:
        """Write `to_json`, gzip when the name ends in `.gz`."""
        data = json.dumps(self.to_json(), separators=(",", ":")).encode()
        path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)


def _rounded(record: Mapping[str, object]) -> dict[str, object]:
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in record.items()}
