"""The result of a chaos run: the counts, whether each is as required, and the text of the report. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lab.chaos.inject import Injected
from lab.chaos.losses import Loss
from lab.chaos.plan import FaultKind, PlannedFault, fewest_faults
from lab.chaos.watch import Breaches
from lab.evaluation.bars import Bar, at_least, at_most
from trimtab.api.actuator.v1 import actuator_pb2

FAULTS_PER_MINUTE = 8.0
TRANSITIONS_PER_MINUTE = 2.0
"""A run with fewer has proved little."""
ALL_KINDS_S = 120.0
_SHOWN = 12


def kinds_asked_for(duration_s: float) -> int:
    """Every kind of a run of two minutes, half of them of a shorter one, never more than each schedule of it has."""
    asked = len(FaultKind) if duration_s >= ALL_KINDS_S else math.ceil(len(FaultKind) / 2)
    return min(asked, fewest_faults(duration_s))


def faults_asked_for_per_minute(duration_s: float) -> float:
    """Less than usual of runs below 40 s: no faults come in their first and last seconds."""
    return min(FAULTS_PER_MINUTE, fewest_faults(duration_s) / (duration_s / 60))


@dataclass(frozen=True, kw_only=True)
class ChaosReport:
    """Everything that was counted."""

    duration_s: float
    seed: int
    servers: int
    requests_sent: int
    requests_complete: int
    losses: Sequence[Loss]
    reissues: Mapping[str, int]
    aborted_by_sleep: int
    misrouted: int
    breaches: Breaches
    looks: Mapping[str, int]
    operations: Sequence[actuator_pb2.Operation]
    undecided: Sequence[str]
    fallen_tokens: Sequence[str]
    replica_changes: Sequence[str]
    unsettled: Sequence[str]
    injected: Sequence[Injected]
    skipped: Sequence[PlannedFault]
    process_restarts: Mapping[str, int]
    load_average: Sequence[float]

    @property
    def lost_to_faults(self) -> list[Loss]:
        """Lost, and only servers that a fault held had them."""
        return [loss for loss in self.losses if loss.of_fault]

    @property
    def lost_by_trimtab(self) -> list[Loss]:
        """Lost, and no injected fault explains it."""
        return [loss for loss in self.losses if not loss.of_fault]

    def transitions(self) -> dict[str, int]:
        """By outcome."""
        return _by_state(self.operations, actuator_pb2.OPERATION_KIND_TRANSITION)

    @property
    def bars(self) -> list[Bar]:
        """What was requested."""
        minutes = self.duration_s / 60
        kinds = {one.kind for one in self.injected}
        faults_per_minute = faults_asked_for_per_minute(self.duration_s)
        return [
            at_most("lost_by_trimtab", len(self.lost_by_trimtab), 0),
            at_most("aborted_by_sleep", self.aborted_by_sleep, 0),
            at_most("misrouted", self.misrouted, 0),
            at_most("sent_after_acknowledgement", len(self.breaches.hidden), 0),
            at_most("budget_violations", len(self.breaches.budget), 0),
            at_most("floor_violations", len(self.breaches.floor), 0),
            at_most("undecided_transitions", len(self.undecided), 0),
            at_most("fallen_fencing_tokens", len(self.fallen_tokens), 0),
            at_most("replica_changes", len(self.replica_changes), 0),
            at_most("unsettled_at_the_end", len(self.unsettled), 0),
            at_most("faults_not_recovered", sum(one.recovery_s is None for one in self.injected), 0),
            at_least("looks_at_gpus_per_s", self.looks["gpus"] / self.duration_s, 2),
            at_least("faults_per_minute", len(self.injected) / minutes, faults_per_minute),
            at_least("kinds_of_fault", len(kinds), kinds_asked_for(self.duration_s)),
            at_least("transitions_per_minute", sum(self.transitions().values()) / minutes, TRANSITIONS_PER_MINUTE),
        ]

    def recovery(self) -> dict[str, dict[str, float | int | None]]:
        """By kind of fault: how many, how many made good, median and longest recovery in seconds."""
        found: dict[str, dict[str, float | int | None]] = {}
        for kind in FaultKind:
            of_kind = [one for one in self.injected if one.kind is kind]
            times_s = [one.recovery_s for one in of_kind if one.recovery_s is not None]
            if of_kind:
                found[kind.value] = {
                    "faults": len(of_kind),
                    "recovered": len(times_s),
                    "median_s": round(statistics.median(times_s), 2) if times_s else None,
                    "longest_s": round(max(times_s), 2) if times_s else None,
                }
        return found

    def to_json(self, *, machine: Mapping[str, object]) -> dict[str, object]:
        """One object: machine, inputs, results, bars."""
        return {
            "machine": {**machine, "load_average": list(self.load_average)},
            "inputs": {"duration_s": self.duration_s, "seed": self.seed, "servers": self.servers},
            "results": {
                "requests_sent": self.requests_sent,
                "requests_complete": self.requests_complete,
                "requests_lost": len(self.losses),
                "lost_to_faults": [asdict(loss) for loss in self.lost_to_faults],
                "lost_by_trimtab": [asdict(loss) for loss in self.lost_by_trimtab],
                "reissued": dict(self.reissues),
                "aborted_by_sleep": self.aborted_by_sleep,
                "misrouted": self.misrouted,
                "sent_after_acknowledgement": self.breaches.hidden,
                "budget_violations": self.breaches.budget,
                "floor_violations": self.breaches.floor,
                "looks": dict(self.looks),
                "transitions": self.transitions(),
                "corrections": _by_state(self.operations, actuator_pb2.OPERATION_KIND_OVERLAY),
                "undecided_transitions": list(self.undecided),
                "fallen_fencing_tokens": list(self.fallen_tokens),
                "replica_changes": list(self.replica_changes),
                "unsettled_at_the_end": list(self.unsettled),
                "faults": self.recovery(),
                "faults_without_victim": len(self.skipped),
                "process_restarts": dict(self.process_restarts),
            },
            "bars": [bar.document() for bar in self.bars],
        }

    def lines(self) -> list[str]:
        """The counts as text, and every loss and breach up to a few of each."""
        moves = _words(self.transitions())
        corrections = _words(_by_state(self.operations, actuator_pb2.OPERATION_KIND_OVERLAY))
        whose = f"{len(self.lost_to_faults)} to faults, {len(self.lost_by_trimtab)} by Trimtab"
        lines = [
            f"requests: {self.requests_sent} sent, {self.requests_complete} complete, {len(self.losses)} lost: {whose}",
            f"reissued: {_words(self.reissues)}",
            f"transitions: {moves}; corrections: {corrections}",
            f"looks: {_words(self.looks)}; restarts: {_words(self.process_restarts)}",
        ]
        lines += [
            f"{kind}: {item['recovered']} of {item['faults']} made good, median {item['median_s']} s, "
            f"longest {item['longest_s']} s"
            for kind, item in self.recovery().items()
        ]
        lines += [f"lost: {one.service} {one.request_id} {one.outcome}, {one.why}" for one in self.losses[:_SHOWN]]
        breaches = (
            *self.breaches.budget,
            *self.breaches.floor,
            *self.breaches.hidden,
            *self.undecided,
            *self.fallen_tokens,
            *self.replica_changes,
            *self.unsettled,
        )
        return lines + [f"breach: {text}" for text in breaches[:_SHOWN]]


def _by_state(operations: Sequence[actuator_pb2.Operation], kind: int) -> dict[str, int]:
    states = Counter(
        actuator_pb2.OperationState.Name(operation.state).removeprefix("OPERATION_STATE_").lower()
        for operation in operations
        if operation.kind == kind
    )
    return dict(sorted(states.items()))


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count) or "none"
