"""A working copy of the state inside one pure step: changes are collected, revisions are given at the end.

``Transaction`` is mutable so that the steps of a tick see one another's changes (two wakes never get one GPU); it never
leaves the function that made it.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

from actuator.core import holds
from actuator.core.endpoints import endpoints_of, leased
from actuator.core.gpu_occupancy import taken_gpus
from actuator.core.held import held
from actuator.core.lifecycle import move
from actuator.core.model import FINISHED, ActionKind, Gateway, Gpu, Limits, Operation, Replica, State
from actuator.core.refused import RefusedKind, RefusedRecord
from actuator.core.world import Action, Outcome, ProbeResult, World
from trimtab.domain.vocabulary import HoldOwner, LifeCycle, Role


class Transaction:
    """One step's copy of the state, with what it was derived from."""

    def __init__(self, state: State, world: World, limits: Limits, now_s: float) -> None:
        self.base = state
        self.world = world
        self.limits = limits
        self.now_s = now_s
        self.replicas = dict(state.replicas)
        self.pools = dict(state.pools)
        self.operations = dict(state.operations)
        self.gateways = dict(state.gateways)
        self.meta = state.meta
        self.actions: list[Action] = []
        self.outcomes: dict[str, Outcome] = {}
        # Passive transitions of this step, for logs and metrics.
        self.notes: list[str] = []
        self.refused = state.refused
        # What a record that cannot be read keeps from being changed.
        self.held = held(state, world)

    def move(self, replica: Replica, target: LifeCycle, detail: str = "") -> Replica:
        """Moves by the table and keeps the result."""
        if replica.life_cycle is not target:
            self.notes.append(f"{replica.name}: {replica.life_cycle} → {target}" + (f" ({detail})" if detail else ""))
        return self.keep(move(replica, target, now_s=self.now_s, detail=detail))

    def keep(self, replica: Replica) -> Replica:
        """Stores a changed record."""
        self.replicas[replica.name] = replica
        return replica

    def hold(self, replica: Replica, owner: HoldOwner, reason: str) -> Replica:
        """Puts a hold and keeps the result."""
        return self.keep(holds.put(replica, owner, reason=reason, now_s=self.now_s))

    def probe(self, name: str) -> ProbeResult | None:
        """The newest fresh look at a server; None when there is none."""
        probe = self.world.probes.get(name)
        if probe is None or self.now_s - probe.as_of_s > self.limits.fresh_s:
            return None
        return probe

    def leased_gateways(self) -> list[Gateway]:
        """Gateways that may be routing."""
        return leased(self.gateways, self.now_s)

    def act(self, action: Action) -> None:
        """Asks the shell for an action, unless it is already acting on that replica."""
        if action.replica not in self.world.busy and all(other.replica != action.replica for other in self.actions):
            replica = self.replicas.get(action.replica)
            self.actions.append(replace(action, since_s=replica.since_s if replica is not None else 0.0))

    def outcome(self, name: str, kind: ActionKind) -> Outcome | None:
        """What came of an action of that kind on the replica; None when nothing did since the last step."""
        outcome = self.outcomes.get(name)
        return outcome if outcome is not None and outcome.kind is kind else None

    def unfinished(self) -> Iterator[Operation]:
        """Operations under way, oldest first."""
        pending = [operation for operation in self.operations.values() if not operation.finished]
        yield from sorted(pending, key=lambda operation: (operation.create_s, operation.operation_id))

    def claimed(self) -> dict[str, str]:
        """Replica → the unfinished operation that answers for it; no other operation touches it."""
        return {
            step.replica: operation.operation_id
            for operation in self.unfinished()
            for step in operation.steps
            if operation.answers_for(step)
        }

    def held_replicas(self) -> set[str]:
        """Replicas that are held for a record that cannot be read."""
        if not self.refused:
            return set()
        return {name for name, replica in self.replicas.items() if self.held.replica(replica) is not None}

    def next_operation_id(self) -> str:
        """A time-ordered id, unique for this cluster."""
        number = self.meta.operation_counter + 1
        self.meta = replace(self.meta, operation_counter=number)
        return f"o-{int(self.now_s * 1000):x}-{number}"

    def routable_count(self, service: str, role: Role) -> int:
        """Routable replicas of a role in this cluster."""
        return sum(
            1
            for replica in self.replicas.values()
            if replica.routable and replica.spec.service == service and replica.spec.role is role
        )

    def claimed_gpus(self) -> frozenset[Gpu]:
        """GPUs of every pool, and of what cannot be read."""
        return frozenset(gpu for pool in self.pools.values() for gpu in pool.gpus) | self.held.gpus.keys()

    def refuse(self, refused: tuple[RefusedRecord, ...]) -> None:
        """Set the records that cannot be read; values in their place are removed."""
        for record in refused:
            if record.kind is RefusedKind.REPLICA:
                self.replicas.pop(record.name, None)
            elif record.kind is RefusedKind.POOL:
                self.pools.pop(record.name, None)
            elif record.kind is RefusedKind.OPERATION:
                self.operations.pop(record.name, None)
        self.refused = refused
        seen = replace(self.base, replicas=self.replicas, pools=self.pools, operations=self.operations, refused=refused)
        self.held = held(seen, self.world)

    def commit(self) -> State:
        """The new state, with revisions for what changed."""
        self._bump_endpoints()
        self._bump_replicas()
        self._bump_inventory()
        self._prune()
        return State(
            replicas=self.replicas,
            pools=self.pools,
            operations=self.operations,
            gateways=self.gateways,
            meta=self.meta,
            refused=self.refused,
        )

    def _bump_endpoints(self) -> None:
        if self.replicas == self.base.replicas:
            return
        if endpoints_of(self.replicas) != endpoints_of(self.base.replicas):
            self.meta = replace(self.meta, endpoint_revision=self.meta.endpoint_revision + 1)
        for name in sorted(self.replicas):
            before, after = self.base.replicas.get(name), self.replicas[name]
            # A new record may have had a predecessor of its name that older sets show.
            if not after.routable and (before is None or before.routable or after.hidden_revision == 0):
                self.replicas[name] = replace(after, hidden_revision=self.meta.endpoint_revision)

    def _bump_replicas(self) -> None:
        revision = self.meta.replica_revision
        for name in sorted(self.replicas):
            if self.replicas[name] != self.base.replicas.get(name):
                revision += 1
                self.replicas[name] = replace(self.replicas[name], revision=revision)
        if self.base.replicas.keys() - self.replicas.keys():
            revision += 1
        self.meta = replace(self.meta, replica_revision=revision)

    def _bump_inventory(self) -> None:
        taken = taken_gpus(self.replicas, self.claimed_gpus(), self.world)
        # `Node.taken` is part of `taken`; its own repr has no stable order.
        nodes = [replace(self.world.nodes[name], taken=frozenset()) for name in sorted(self.world.nodes)]
        text = repr(nodes) + repr(sorted(taken))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if digest != self.meta.inventory_digest:
            self.meta = replace(self.meta, inventory_digest=digest, inventory_revision=self.meta.inventory_revision + 1)

    def _prune(self) -> None:
        finished = [operation for operation in self.operations.values() if operation.state in FINISHED]
        oldest_first = sorted(finished, key=lambda operation: (operation.update_s, operation.operation_id))
        for operation in oldest_first[: max(0, len(finished) - self.limits.keep_operations)]:
            del self.operations[operation.operation_id]
        for name, gateway in list(self.gateways.items()):
            if self.now_s - gateway.lease_until_s > self.limits.gateway_forget_s:
                del self.gateways[name]
