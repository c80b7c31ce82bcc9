"""The actuator on virtual time: its core decides, simulated servers carry it out, the gateway acknowledges.

One cluster, one gateway, one pool or several. The core is stepped when something happened (a new desired state, the
end of an action, an acknowledgement, a replica that became empty), when the time of a step has come and, while an
operation is under way, as often as the real one probes servers that an operation works on. Limits: probes are always
fresh and nothing is stored, so crashes of the actuator are tested by its own tests only; a server whose memory is taken
when it starts is absent, where a real one waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from actuator.core import model
from actuator.core.admission_pool import PoolRequest, apply_pool_state
from actuator.core.cancelling import cancel_operation
from actuator.core.endpoints import endpoint_set
from actuator.core.listing import listed_operation, listed_replica
from actuator.core.model import (
    ActionKind,
    Gateway,
    Gpu,
    Limits,
    OperationKind,
    PlacedSpec,
    State,
    StepKind,
)
from actuator.core.tick import due_s, tick
from actuator.core.world import Action, GpuMemory, Listed, Node, Outcome, ProbeResult, RunState, World
from gateway.core.routing import to_route
from lab.virtual.gateway import CLUSTER, VirtualGateway
from lab.virtual.servers import ServerState, VirtualServers
from simulator.core.memory import GpuId
from simulator.core.profile import Profile
from trimtab.domain.operation import Operation
from trimtab.domain.pool import DesiredPool
from trimtab.domain.replica import Replica
from trimtab.domain.vocabulary import LifeCycle, Role

GATEWAY = "gateway"
WRITER = "policy-engine"
TOKEN = 1
RECONCILE_S = 2.0
"""Between steps while nothing happens, where time alone may bring something: the real one's interval."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActuatorPace:
    """Delays of observation, as in the real actuator's settings."""

    look_s: float = 0.25
    """Between looks at servers that an operation works on."""
    acknowledge_s: float = 0.02
    """Until the gateway has applied an endpoint set and acknowledged it."""
    answer_s: float = 0.0
    """What a sleep, a wake and a canary token take beside the server's own time: the call, and a look at its end."""
    again_s: float | None = None
    """Until one more look after an acknowledgement or the end of an action; None where the next one has to do."""


class VirtualActuator:
    """One cluster's actuator. `nodes` and `specs` are what the cluster has; servers of all specs must exist.

    `profiles` are those of servers that it may create, by name. `on_created` and `on_deleted` are called for servers
    that come and go, `on_change` at the end of operations.
    """

    def __init__(
        self,
        servers: VirtualServers,
        gateway: VirtualGateway,
        *,
        nodes: Sequence[Node],
        specs: Sequence[PlacedSpec],
        limits: Limits | None = None,
        profiles: Mapping[str, Profile],
        pace: ActuatorPace | None = None,
        on_change: Callable[[], None] = lambda: None,
        on_created: Callable[[PlacedSpec], None] = lambda _: None,
        on_deleted: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.servers = servers
        self.gateway = gateway
        self.limits = limits if limits is not None else Limits()
        self.state = State()
        self.operations_ended: list[model.Operation] = []
        self._pace = pace if pace is not None else ActuatorPace()
        self._nodes = {node.node: node for node in nodes}
        self._specs = {spec.replica: spec for spec in specs}
        self._busy: set[str] = set()
        self._outcomes: list[Outcome] = []
        self._due_s: float | None = None
        self._profiles = profiles
        self._on_change = on_change
        self._on_created = on_created
        self._on_deleted = on_deleted
        self.lost_requests = 0
        """Requests that deleted servers took with them."""

    def start(self) -> None:
        """Take up the servers that are there, and let the gateway know of them."""
        self._step()

    def apply(self, desired: DesiredPool) -> Operation | None:
        """Take a pool's desired state from its only writer; the operation that works towards it, if any.

        Raises `actuator.core.fencing.Refused`.
        """
        request = PoolRequest(desired=desired, writer=WRITER, token=TOKEN)
        answer = apply_pool_state(self._with_gateway(), request, self._world(), now_s=self._now_s, limits=self.limits)
        self.state = answer.state
        self._step()
        return None if answer.operation is None else listed_operation(answer.operation, cluster=CLUSTER)

    def cancel(self, operation_id: str, reason: str) -> None:
        """Roll an operation back. Raises `actuator.core.fencing.Refused`."""
        self.state, _ = cancel_operation(
            self._with_gateway(), operation_id, reason, self._world(), now_s=self._now_s, limits=self.limits
        )
        self._step()

    def kick(self) -> None:
        """Something happened that the core should look at now."""
        self._call_at(self._now_s)

    def unfinished(self) -> list[model.Operation]:
        """Operations under way, oldest first."""
        found = [operation for operation in self.state.operations.values() if not operation.finished]
        return sorted(found, key=lambda operation: (operation.create_s, operation.operation_id))

    def listed_operations(self) -> tuple[Operation, ...]:
        """Operations under way as others see them, oldest first."""
        return tuple(listed_operation(operation, cluster=CLUSTER) for operation in self.unfinished())

    def listed_replicas(self) -> tuple[Replica, ...]:
        """Replicas as others see them, by name, with the requests that are in them now."""
        found: list[Replica] = []
        for name, record in sorted(self.state.replicas.items()):
            up = record.life_cycle in (LifeCycle.ACTIVE, LifeCycle.DRAINING)
            in_flight = self.servers.in_flight(name) if up else 0
            found.append(listed_replica(record, cluster=CLUSTER, in_flight=in_flight))
        return tuple(found)

    @property
    def _now_s(self) -> float:
        return self.servers.clock.now_s

    def _call_at(self, at_s: float) -> None:
        if self._due_s is not None and self._due_s <= at_s:
            return
        self._due_s = at_s

        def call(now_s: float) -> None:
            if self._due_s is not None and self._due_s <= now_s:
                self._due_s = None
                self._step()

        self.servers.clock.call_at(at_s, call)

    def _look_again(self) -> None:
        """What waits for a look from after this moment need not wait for the next one."""
        if self._pace.again_s is not None:
            self.servers.clock.call_at(self._now_s + self._pace.again_s, lambda _: self._step())

    def _step(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        before = self.state
        done = tick(self._with_gateway(), self._world(), outcomes, now_s=self._now_s, limits=self.limits)
        self.state = done.state
        for action in done.actions:
            self._act(action)
        ended = [
            operation
            for name, operation in self.state.operations.items()
            if operation.finished and (name not in before.operations or not before.operations[name].finished)
        ]
        self.operations_ended.extend(ended)
        if self.state.meta.endpoint_revision != self.gateway.revision:
            self.servers.clock.call_at(self._now_s + self._pace.acknowledge_s, self._acknowledge)
        if self.unfinished():
            due = due_s(self.state, self._now_s)
            look_s = self._now_s + self._pace.look_s
            self._call_at(look_s if due is None else min(due, look_s))
        elif self._watches():
            self._call_at(self._now_s + RECONCILE_S)
        if ended:
            self._on_change()

    def _watches(self) -> bool:
        """Whether time alone brings something: a pre-warming may begin, or a server was lost or is not known yet."""
        return self._prewarms() or self.state.replicas.keys() != self.servers.by_name.keys()

    def _prewarms(self) -> bool:
        return any(pool.prewarm for pool in self.state.pools.values())

    def _acknowledge(self, now_s: float) -> None:
        shown = endpoint_set(self.state, cluster=CLUSTER, lease_s=self.limits.gateway_lease_s)
        if shown.revision == self.gateway.revision:
            return
        self.gateway.apply(shown.revision, to_route(shown.endpoints), now_s)
        self.kick()
        self._look_again()

    def _with_gateway(self) -> State:
        left = self.gateway.left_behind()
        said = Gateway(
            gateway=GATEWAY,
            lease_until_s=self._now_s + self.limits.gateway_lease_s,
            acknowledged_revision=self.gateway.revision,
            in_flight={item.replica: item.requests for item in left},
            pinned={item.replica: item.pinned for item in left},
        )
        return dataclasses.replace(self.state, gateways={GATEWAY: said})

    def _world(self) -> World:
        now_s = self._now_s
        listed: dict[str, Listed] = {}
        probes: dict[str, ProbeResult] = {}
        worked_on = {step.replica for operation in self.unfinished() for step in operation.steps}
        guarded = self._guarded()
        # Pre-warming looks for donors among all that serve.
        everybody = self._prewarms()
        for name, server in self.servers.by_name.items():
            starting = server.state is ServerState.STARTING
            run_state = RunState.STARTING if starting else RunState.RUNNING
            placed = self._specs[name]
            listed[name] = Listed(
                spec=placed.spec, placement=placed.placement, address=f"virtual://{name}", run_state=run_state
            )
            # A server is only probed for what is used: requests where their end is waited for, queue and
            # cache where a release may leave too much load to the replicas that stay.
            counts = server.awake and (everybody or name in worked_on)
            in_flight = self.servers.in_flight(name) if counts else 0
            guards = server.awake and (everybody or (server.service, server.role) in guarded)
            waiting, kv_usage = self.servers.load(name) if guards else (None, None)
            probes[name] = ProbeResult(
                as_of_s=now_s,
                healthy=not starting,
                refused=starting,
                sleeping=server.state in (ServerState.SLEEPING, ServerState.FALLING_ASLEEP, ServerState.WAKING),
                in_flight=in_flight,
                waiting=waiting,
                kv_usage=kv_usage,
            )
        memory: dict[Gpu, GpuMemory] = {
            (gpu.node, gpu.index): GpuMemory(used_gib=self.servers.memory.used_gib(gpu), memory_gib=gib, as_of_s=now_s)
            for gpu, gib in self.servers.memory.capacity_gib.items()
        }
        return World(
            listed=listed,
            listed_as_of_s=now_s,
            nodes=self._nodes,
            gpu_memory=memory,
            measures_gpus=True,
            probes=probes,
            busy=frozenset(self._busy),
        )

    def _guarded(self) -> set[tuple[str, Role]]:
        """Service and role of every release that is under way in a transition: its donors are watched."""
        return {
            (spec.service, spec.role)
            for operation in self.unfinished()
            if operation.kind is OperationKind.TRANSITION
            for step in operation.steps
            if step.kind is StepKind.RELEASE and not step.finished
            for spec in [self._specs[step.replica]]
        }

    def _act(self, action: Action) -> None:
        name = action.replica
        self._busy.add(name)

        def done() -> None:
            outcome = Outcome(kind=action.kind, replica=name, ok=True)
            if self._pace.answer_s > 0:
                self.servers.clock.call_at(self._now_s + self._pace.answer_s, lambda _: self._end(outcome))
            else:
                self._end(outcome)

        if action.kind is ActionKind.CREATE and action.placed is not None:
            self._create(action.placed)
        elif action.kind is ActionKind.DELETE:
            self._delete(name)
        elif name not in self.servers.by_name:
            self._later(Outcome(kind=action.kind, replica=name, ok=False, error="its server is gone"))
        elif action.kind is ActionKind.SLEEP:
            unfinished = self.servers.sleep(name, done)
            if unfinished:
                self._later(Outcome(kind=action.kind, replica=name, ok=False, busy=True, error="requests in flight"))
        elif action.kind is ActionKind.WAKE:
            short = self.servers.wake(name, done)
            if short is not None:
                self._later(Outcome(kind=action.kind, replica=name, ok=False, error=str(short)))
        else:
            self.servers.clock.call_at(self._now_s + self.servers.canary_s(name), lambda _: done())

    def _create(self, placed: PlacedSpec) -> None:
        name = placed.replica
        self._specs[name] = placed
        short = self.servers.start(
            name,
            service=placed.service,
            role=placed.role,
            profile=self._profiles[placed.spec.profile],
            gpus=gpu_ids(placed),
            done=self.kick,
        )
        if short is None:
            self._on_created(placed)
        error = "" if short is None else str(short)
        self._later(Outcome(kind=ActionKind.CREATE, replica=name, ok=short is None, error=error))

    def _delete(self, name: str) -> None:
        if name in self.servers.by_name:
            self.lost_requests += self.gateway.cut_off(name, self._now_s)
            self.servers.remove(name)
            self._on_deleted(name)
        self._later(Outcome(kind=ActionKind.DELETE, replica=name, ok=True))

    def _later(self, outcome: Outcome) -> None:
        self.servers.clock.call_at(self._now_s, lambda _: self._end(outcome))

    def _end(self, outcome: Outcome) -> None:
        self._busy.discard(outcome.replica)
        self._outcomes.append(outcome)
        self.kick()
        self._look_again()


def gpu_ids(placed: PlacedSpec) -> tuple[GpuId, ...]:
    """The GPUs of a replica as the simulator names them."""
    return tuple(GpuId(node, index) for node, index in placed.gpus)
