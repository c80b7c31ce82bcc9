"""What is held because a record about it cannot be read, and why.

While something is held, no operation on it begins or goes on, and no desired state for it is accepted. Its servers are
still observed.

    bad replica     itself; the pools it belongs to, its group, operations it is part of. Its GPUs count as taken; when
                    they are not known, the cluster accepts no placement and no pool new GPUs
    bad pool        the pool. The GPUs of its overlay like those of a replica
    bad operation   its subject; when that is not known, every subject
    bad metadata    the cluster: the shell serves and writes nothing (``actuator.shell.controller``)

The GPUs of a bad replica are those that the backend lists it with, else those of its record where that is undamaged,
else those of its entry in a pool's overlay.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from actuator.core.fencing import Refused, refuse
from actuator.core.model import Gpu, Operation, PlacedSpec, Replica, State
from actuator.core.refused import RefusedKind, RefusedRecord
from actuator.core.world import World

REASON = "RECORD_REFUSED"
"""The error reason for a change of something held."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Each mapping gives the record that is to blame."""

    # Pools, Deployment Groups, and servers of neither.
    subjects: Mapping[str, RefusedRecord] = field(default_factory=dict)
    # Replicas whose own record is refused.
    replicas: Mapping[str, RefusedRecord] = field(default_factory=dict)
    gpus: Mapping[Gpu, RefusedRecord] = field(default_factory=dict)
    # A record whose GPUs are not known.
    unknown_gpus: RefusedRecord | None = None
    # An operation whose subject is not known.
    everything: RefusedRecord | None = None

    def subject(self, name: str) -> RefusedRecord | None:
        """Why a pool or group is held; None when it is not."""
        return self.everything or self.subjects.get(name)

    def replica(self, replica: Replica) -> RefusedRecord | None:
        """Why a replica is held; None when it is not."""
        spec = replica.spec
        if self.everything is not None:
            return self.everything
        for name in (spec.pool, spec.group, replica.name):
            if name and name in self.subjects:
                return self.subjects[name]
        return self.placed(replica.placed)

    def placed(self, placed: PlacedSpec) -> RefusedRecord | None:
        """Why no such replica may be made: its name or one of its GPUs is a bad replica's."""
        blamed = self.replicas.get(placed.replica)
        return blamed or next((self.gpus[gpu] for gpu in placed.gpus if gpu in self.gpus), None)

    def operation(self, operation: Operation) -> RefusedRecord | None:
        """Why an operation does not go on; None when it does."""
        for step in operation.steps:
            if step.replica in self.replicas:
                return self.replicas[step.replica]
        return self.subject(operation.subject)

    def check_subject(self, name: str) -> None:
        """Raises ``fencing.Refused`` when the pool or group is held."""
        blamed = self.subject(name)
        if blamed is not None:
            raise refuse_for(f"{name} is held", blamed)


NOTHING = Held()


def held(state: State, world: World) -> Held:
    """What is held in that state."""
    if not state.refused:
        return NOTHING
    subjects: dict[str, RefusedRecord] = {}
    gpus: dict[Gpu, RefusedRecord] = {}
    unknown_gpus = everything = None
    for record in state.refused:
        names = frozenset[str]()
        if record.kind is RefusedKind.META:
            everything = everything or record
        elif record.kind is RefusedKind.OPERATION:
            names = _subjects_of_operation(state, record)
            everything = everything or (None if names else record)
        else:
            known = _gpus_of(record, state, world)
            unknown_gpus = unknown_gpus or (record if known is None else None)
            gpus.update({gpu: record for gpu in known or () if gpu not in gpus})
            names = _subjects_of_owner(record, known or (), state, world)
        for name in sorted(names):
            subjects.setdefault(name, record)
    replicas = {record.name: record for record in state.refused if record.kind is RefusedKind.REPLICA}
    return Held(subjects=subjects, replicas=replicas, gpus=gpus, unknown_gpus=unknown_gpus, everything=everything)


def refuse_for(what: str, record: RefusedRecord) -> Refused:
    """The error for a caller; ``what`` is what was not done."""
    return refuse(REASON, f"{what}: {record.text}", kind=record.kind, name=record.name, remedy=record.remedy)


def refused_operation(state: State, operation_id: str) -> RefusedRecord | None:
    """The refused record of that operation; None when it has none."""
    records = (record for record in state.refused if record.kind is RefusedKind.OPERATION)
    return next((record for record in records if record.name == operation_id), None)


def _gpus_of(record: RefusedRecord, state: State, world: World) -> tuple[Gpu, ...] | None:
    """The GPUs that a replica holds, or a pool's overlay names; None when that is not known."""
    if record.kind is RefusedKind.REPLICA:
        listed = world.listed.get(record.name) if world.listed is not None else None
        if listed is not None:
            return listed.placement.gpus
        if record.gpus is None:
            entries = (pool.placed(record.name) for pool in state.pools.values())
            return next((placed.gpus for placed in entries if placed is not None), None)
    return record.gpus


def _subjects_of_owner(record: RefusedRecord, gpus: tuple[Gpu, ...], state: State, world: World) -> frozenset[str]:
    """What is held for a bad replica or pool."""
    found = {record.name, record.pool, record.group}
    if record.kind is RefusedKind.REPLICA:
        listed = world.listed.get(record.name) if world.listed is not None else None
        if listed is not None:
            found.update((listed.spec.pool, listed.spec.group))
        for pool in state.pools.values():
            if pool.placed(record.name) is not None or not pool.gpus.isdisjoint(gpus):
                found.add(pool.pool)
        for operation in state.operations.values():
            if not operation.finished and any(step.replica == record.name for step in operation.steps):
                found.add(operation.subject)
    return frozenset(found - {""})


def _subjects_of_operation(state: State, record: RefusedRecord) -> frozenset[str]:
    """The subjects of a bad operation: its own, where known, and those of other records that name it."""
    if record.subject and (record.subject_certain or record.subject in _known_subjects(state)):
        return frozenset({record.subject})
    found = {pool.pool for pool in state.pools.values() if pool.operation_id == record.name}
    found.update(other.subject for other in state.operations.values() if record.name in other.waits_for)
    for replica in state.replicas.values():
        if any(hold.reason == record.name for hold in replica.holds):
            found.add(replica.spec.pool or replica.spec.group or replica.name)
    return frozenset(found)


def _known_subjects(state: State) -> Iterator[str]:
    yield from state.pools
    for replica in state.replicas.values():
        yield from (replica.spec.pool, replica.spec.group, replica.name)
