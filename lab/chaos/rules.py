"""The invariants that a chaos run checks while it runs, as pure functions of what was seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2

_SETTLED = (types_pb2.LIFE_CYCLE_ACTIVE, types_pb2.LIFE_CYCLE_SLEEPING)


@dataclass(frozen=True, slots=True)
class Seen:
    """A replica as the actuator listed it. `revision` is the one of its last change."""

    replica: str
    service: str
    life_cycle: int
    routable: bool
    released: bool
    gpus: tuple[tuple[str, int], ...]
    address: str
    revision: int

    @classmethod
    def of(cls, replica: actuator_pb2.Replica) -> Seen:
        """The part that the rules need."""
        return cls(
            replica=replica.replica,
            service=replica.service,
            life_cycle=replica.life_cycle,
            routable=replica.routable,
            released=any(hold.owner == types_pb2.HOLD_OWNER_RELEASE for hold in replica.holds),
            gpus=tuple((replica.node, index) for index in replica.gpu_indices),
            address=replica.address,
            revision=replica.revision,
        )

    @property
    def settled(self) -> bool:
        """Serving, or asleep: no operation is under way on it, and it has no fault."""
        return self.life_cycle in _SETTLED and (self.routable or self.life_cycle == types_pb2.LIFE_CYCLE_SLEEPING)


def two_awake(before: Mapping[str, bool | None], now: Mapping[str, bool | None], replicas: Iterable[Seen]) -> list[str]:
    """GPUs with two servers that both answered in two rounds in a row that they are awake; None is no answer.

    One round alone proves nothing, since its answers are not of one moment; what was awake in two rounds was so all the
    time between them.
    """
    awake = {name for name, word in now.items() if word and before.get(name)}
    owners: dict[tuple[str, int], list[str]] = {}
    for replica in replicas:
        if replica.replica in awake:
            for gpu in replica.gpus:
                owners.setdefault(gpu, []).append(replica.replica)
    return [f"{gpu[0]}:{gpu[1]} has {', '.join(sorted(names))}" for gpu, names in sorted(owners.items()) if names[1:]]


def hidden_below_floor(before: Mapping[str, Seen], now: Mapping[str, Seen], floors: Mapping[str, int]) -> list[str]:
    """Services of which a release hid a replica although too few were left.

    What was lost after the hold was put (at a later revision) was still there when the release was begun.
    """
    found = []
    for service, floor in sorted(floors.items()):
        hidden = [
            seen
            for name, seen in now.items()
            if seen.service == service
            and seen.life_cycle == types_pb2.LIFE_CYCLE_DRAINING
            and seen.released
            and name in before
            and before[name].routable
        ]
        if not hidden:
            continue
        at_revision = min(seen.revision for seen in hidden)
        left = sum(seen.routable for seen in now.values() if seen.service == service)
        lost_later = sum(
            1
            for name, seen in now.items()
            if seen.service == service
            and not seen.routable
            and seen not in hidden
            and name in before
            and before[name].routable
            and seen.revision > at_revision
        )
        if left + lost_later < floor:
            names = ", ".join(sorted(seen.replica for seen in hidden))
            found.append(f"{names} hidden with {left + lost_later} of {service} left, the floor is {floor}")
    return found


def undecided(operations: Sequence[actuator_pb2.Operation], decisions: Sequence[decision_pb2.Decision]) -> list[str]:
    """Transitions that are not the only one of exactly one recorded decision."""
    known = [decision.decision_id for decision in decisions]
    found = []
    seen: dict[str, str] = {}
    for operation in sorted(operations, key=lambda operation: operation.create_time.ToNanoseconds()):
        if operation.kind != actuator_pb2.OPERATION_KIND_TRANSITION:
            continue
        decision = operation.decision_id
        if known.count(decision) != 1:
            found.append(f"{operation.operation_id}: {known.count(decision)} records of decision {decision!r}")
        elif decision in seen:
            found.append(f"{operation.operation_id} and {seen[decision]} carry out one decision, {decision}")
        seen[decision] = operation.operation_id
    return found


def tokens_that_fell(decisions: Sequence[decision_pb2.Decision]) -> list[str]:
    """Decisions written with a lower fencing token than an earlier one: two leaders at once."""
    found = []
    highest = 0
    for decision in sorted(decisions, key=lambda decision: decision.decide_time.ToNanoseconds()):
        if decision.fencing.token < highest:
            found.append(f"{decision.decision_id} has token {decision.fencing.token} after {highest}")
        highest = max(highest, decision.fencing.token)
    return found
