"""Which faults come when: a schedule from a seed. Pure.

Times, kinds and lengths are fixed by the seed; which server a fault meets is chosen when its time has come, from those
that can have it then, by a draw that the plan holds already. Two runs of one seed differ where the fleet does.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class FaultKind(enum.StrEnum):
    """What happens. Those of servers first, those of processes last."""

    SERVER_KILLED = "server_killed"
    SERVER_HUNG = "server_hung"
    SERVER_500 = "server_500"
    SERVER_WEDGED = "server_wedged"
    WAKE_REFUSED = "wake_refused"
    STORE_RESTARTED = "store_restarted"
    ACTUATOR_KILLED = "actuator_killed"
    POLICY_KILLED = "policy_killed"
    COLLECTOR_KILLED = "collector_killed"
    ACKNOWLEDGEMENT_DELAYED = "acknowledgement_delayed"
    GATEWAY_SUSPENDED = "gateway_suspended"

    @property
    def of_server(self) -> bool:
        """Whether it befalls one server."""
        return self in SERVER_FAULTS


SERVER_FAULTS: Mapping[FaultKind, str] = {
    FaultKind.SERVER_KILLED: "crash",
    FaultKind.SERVER_HUNG: "hung",
    FaultKind.SERVER_500: "http_500",
    FaultKind.SERVER_WEDGED: "wedged",
    FaultKind.WAKE_REFUSED: "wake_refused",
}
"""Their names in the fleet's admin API."""

VICTIMS: Mapping[FaultKind, str] = {
    FaultKind.STORE_RESTARTED: "store",
    FaultKind.ACTUATOR_KILLED: "actuator",
    FaultKind.POLICY_KILLED: "policy",
    FaultKind.COLLECTOR_KILLED: "collector",
}
"""The process that gets a SIGKILL."""

LENGTHS_S: Mapping[FaultKind, tuple[float, float]] = {
    FaultKind.SERVER_HUNG: (3.0, 15.0),
    FaultKind.SERVER_500: (2.0, 8.0),
    FaultKind.SERVER_WEDGED: (3.0, 15.0),
    FaultKind.WAKE_REFUSED: (8.0, 20.0),
    FaultKind.ACKNOWLEDGEMENT_DELAYED: (4.0, 10.0),
    FaultKind.GATEWAY_SUSPENDED: (0.5, 5.0),
}
"""How long a fault that heals by itself lasts; the others are over at once, and what they broke has to come back."""

DELAYS_S = (0.5, 4.0)
"""How late an acknowledgement comes: from well within the gateway's lease of 3 s to beyond it."""
FIRST_S = 3.0
GAPS_S = (3.0, 6.0)
QUIET_END_S = 5.0


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault. `draw` in [0, 1) chooses the victim, `delay_s` is of late acknowledgements only."""

    at_s: float
    kind: FaultKind
    length_s: float = 0.0
    draw: float = 0.0
    delay_s: float = 0.0


def plan_faults(*, duration_s: float, seed: int) -> list[PlannedFault]:
    """A fault every few seconds, the last one some seconds before the end.

    Kinds come in shuffled rounds, so that each is there equally often, and each once in the first minute.
    """
    source = random.Random(f"chaos/{seed}")
    faults: list[PlannedFault] = []
    kinds: list[FaultKind] = []
    at_s = FIRST_S
    while at_s < duration_s - QUIET_END_S:
        if not kinds:
            kinds = list(FaultKind)
            source.shuffle(kinds)
        kind = kinds.pop()
        low_s, high_s = LENGTHS_S.get(kind, (0.0, 0.0))
        delay_s = source.uniform(*DELAYS_S) if kind is FaultKind.ACKNOWLEDGEMENT_DELAYED else 0.0
        faults.append(PlannedFault(at_s, kind, source.uniform(low_s, high_s), source.random(), delay_s))
        at_s += source.uniform(*GAPS_S)
    return faults


def fewest_faults(duration_s: float) -> int:
    """How many faults every schedule of this length holds, whatever its seed; the first eleven are of as many kinds."""
    return max(0, math.ceil((duration_s - QUIET_END_S - FIRST_S) / GAPS_S[1]))


def choose(candidates: Sequence[str], preferred: Sequence[str], draw: float) -> str | None:
    """The victim: with a draw below one half, one of the preferred where there are any. None when there is none."""
    moving = [name for name in candidates if name in set(preferred)]
    if moving and draw < 0.5:
        return moving[int(draw * 2 * len(moving))]
    return candidates[int(draw * len(candidates))] if candidates else None
