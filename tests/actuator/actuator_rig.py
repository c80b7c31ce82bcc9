"""A cluster in memory, on virtual time: servers, GPU memory, a gateway, a store, an actuator that can die.

The servers live on when the actuator dies, so an action that had begun takes its effect although nobody hears of it.
Every action is judged at the moment when it reaches a server; what breaks an invariant is collected in ``broken``.
"""

from dataclasses import dataclass, field, replace

from actuator.core.admission_pool import PoolRequest, apply_pool_state
from actuator.core.endpoints import Endpoint, EndpointState, endpoints_of
from actuator.core.model import ActionKind, Floor, Gateway, Limits, Operation, Spec, State
from actuator.core.tick import Tick, fail_static, resume, tick
from actuator.core.world import Action, GpuMemory, Listed, Node, Outcome, RunState, Sight, World
from trimtab.words import LifeCycle, Role

STEP_S = 0.5
START_S, FIRST_SLEEP_S, SLEEP_S, WAKE_S, MEMORY_LAG_S = 3.0, 4.0, 1.0, 1.0, 2.0
AWAKE_GIB, ASLEEP_GIB = 34.0, 1.4

LIMITS = Limits(
    starting_s=60.0,
    reactivating_s=20.0,
    sleeping_s=20.0,
    terminating_s=20.0,
    default_drain_s=5.0,
    pinned_wait_s=10.0,
    rollback_s=60.0,
    overlay_s=300.0,
    stuck_s=10.0,
    fresh_s=3.0,
)


def spec(name: str, *gpus: int, service: str = "", node: str = "n0", pool: str = "p", group: str = "") -> Spec:
    """A one-line spec; the service is the name up to its last hyphen."""
    return Spec(
        replica=name,
        service=service or name.rpartition("-")[0],
        role=Role.COLOCATED,
        model="m",
        profile="",
        node=node,
        gpu_indices=gpus,
        pool=pool,
        group=group,
    )


@dataclass
class Server:
    """One simulated vLLM server."""

    spec: Spec
    started_s: float
    ready_s: float
    asleep: bool = False
    slept_before: bool = False
    moving: ActionKind | None = None
    move_ends_s: float = 0.0
    memory_free_s: float = 0.0
    exited: bool = False
    silent: bool = False
    wake_refused: bool = False
    no_token: bool = False
    paused: bool = False
    restarted_s: float = -100.0
    # Not up yet: others have the memory of its GPUs.
    waits: bool = False
    requests: list[tuple[float, bool]] = field(default_factory=list)

    def uses_memory(self, now_s: float) -> bool:
        """Awake, on the way, or asleep and not yet let go."""
        return not self.exited and not self.waits and (not self.asleep or now_s < self.memory_free_s)


class Rig:
    """The cluster and one actuator."""

    def __init__(self, gpus: int = 2) -> None:
        self.now_s = 1_000.0
        self.gpus = gpus
        self.servers: dict[str, Server] = {}
        self.stored = State()
        self.memory: State | None = resume(State(), now_s=self.now_s, limits=LIMITS)
        self.store_away = False
        self.doing: dict[str, tuple[Action, float, int]] = {}
        self.outcomes: list[Outcome] = []
        self.life = 0
        self.misses: dict[str, int] = {}
        self.gateway_up = True
        self.gateway_set: tuple[int, tuple[Endpoint, ...]] = (0, ())
        self.gateway_lag = 0
        self.gateway_requests: dict[str, list[float]] = {}
        self.lost_requests = 0
        self.broken: list[str] = []
        self.revisions: list[int] = []
        self.refuse_sleep: set[str] = set()

    # What the actuator sees

    def world(self) -> World:
        sights = {}
        for name, server in sorted(self.servers.items()):
            if server.exited or server.silent or self.now_s < server.ready_s:
                self.misses[name] = self.misses.get(name, 0) + 1
                refused = not server.silent
                sights[name] = Sight(as_of_s=self.now_s, healthy=False, misses=self.misses[name], refused=refused)
                continue
            self.misses[name] = 0
            sights[name] = Sight(
                as_of_s=self.now_s,
                healthy=True,
                sleeping=server.asleep or server.paused,
                paused=server.paused,
                in_flight=0 if server.asleep else len(server.requests),
            )
        return World(
            listed={
                name: Listed(
                    spec=server.spec,
                    address=f"http://{name}",
                    run_state=RunState.EXITED if server.exited else RunState.RUNNING,
                    start_time_s=server.started_s,
                )
                for name, server in self.servers.items()
            },
            listed_as_of_s=self.now_s,
            nodes={"n0": Node(node="n0", vdc="v", s2="s2", s1="s1", gpu_type="A100", gpus=self.gpus)},
            gpu_memory={
                ("n0", index): GpuMemory(used_gib=self._used(index), memory_gib=40.0, as_of_s=self.now_s)
                for index in range(self.gpus)
            },
            measures_gpus=True,
            sights=sights,
            busy=frozenset(self.doing),
        )

    def _used(self, index: int) -> float:
        on_gpu = [server for server in self.servers.values() if ("n0", index) in server.spec.gpus and not server.exited]
        on_gpu = [server for server in on_gpu if not server.waits]
        return sum(AWAKE_GIB if server.uses_memory(self.now_s) else ASLEEP_GIB for server in on_gpu)

    # Time

    def step(self) -> None:
        """Half a second: servers, gateway, actuator."""
        self.now_s += STEP_S
        for server in self.servers.values():
            self._move_on(server)
        for name in sorted(self.servers):
            self._claim_memory(self.servers[name])
        self._end_actions()
        self._gateway_round()
        if self.memory is not None:
            self._actuator_round(self.memory)

    def run(self, seconds: float) -> None:
        """Several steps."""
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def _move_on(self, server: Server) -> None:
        server.requests = [item for item in server.requests if item[0] > self.now_s]
        if server.moving is None or self.now_s < server.move_ends_s:
            return
        if server.moving is ActionKind.SLEEP:
            server.asleep = server.slept_before = True
            server.memory_free_s = self.now_s + MEMORY_LAG_S
        else:
            server.asleep = False
        server.moving = None

    def _claim_memory(self, server: Server) -> None:
        """One that waits takes its GPUs as soon as nobody uses them; the first by name comes first."""
        rivals = (
            o for o in self.servers.values() if o is not server and not set(o.spec.gpus).isdisjoint(server.spec.gpus)
        )
        if server.waits and not any(other.uses_memory(self.now_s) for other in rivals):
            server.waits, server.ready_s = False, self.now_s + START_S

    def _actuator_round(self, state: State) -> None:
        with_gateways = replace(state, gateways=self._gateways(state))
        if self.store_away:
            self.outcomes.clear()
            self._take(fail_static(with_gateways, self.world(), now_s=self.now_s, limits=LIMITS))
            return
        outcomes, self.outcomes = self.outcomes, []
        result = tick(with_gateways, self.world(), outcomes, now_s=self.now_s, limits=LIMITS)
        self._check_floors(state, result.state)
        self.stored = result.state
        self._take(result)
        for action in result.actions:
            self._begin(action)

    def _take(self, result: Tick) -> None:
        self.memory = result.state
        self.revisions.append(result.state.meta.endpoint_revision)

    def _gateways(self, state: State) -> dict[str, Gateway]:
        known = dict(state.gateways)
        if self.gateway_up:
            left = {name: len(ends) for name, ends in self.gateway_requests.items() if ends}
            known["g"] = Gateway(
                gateway="g",
                lease_until_s=self.now_s + LIMITS.gateway_lease_s,
                acknowledged_revision=self.gateway_set[0],
                in_flight=left,
            )
        return known

    # The gateway

    def _gateway_round(self) -> None:
        for name, ends in self.gateway_requests.items():
            server = self.servers.get(name)
            alive = server is not None and not server.exited
            self.gateway_requests[name] = [end for end in ends if alive and end > self.now_s]
        if self.memory is None or not self.gateway_up:
            return
        if self.gateway_lag > 0:
            self.gateway_lag -= 1
            return
        self.gateway_set = (self.memory.meta.endpoint_revision, endpoints_of(self.memory.replicas))
        for endpoint in self.gateway_set[1]:
            server = self.servers.get(endpoint.replica)
            if endpoint.state is EndpointState.EVICTING and server is not None:
                # Reissued elsewhere: cut off here. Pinned ones stay.
                self.gateway_requests[endpoint.replica] = []
                server.requests = [item for item in server.requests if item[1]]

    def send(self, service: str, duration_s: float, *, pinned: bool = False) -> bool:
        """One request through the gateway; False when it holds the request."""
        routable = [e for e in self.gateway_set[1] if e.service == service and e.state is EndpointState.ROUTABLE]
        if not routable or not self.gateway_up:
            return False
        chosen = min(routable, key=lambda e: (len(self.gateway_requests.get(e.replica, [])), e.replica))
        server = self.servers.get(chosen.replica)
        if server is None or server.exited or self.now_s < server.ready_s:
            self.lost_requests += 1
            return False
        if server.asleep or server.moving is not None:
            self.broken.append(f"request to {chosen.replica}, which sleeps or moves ({server.moving})")
        server.requests.append((self.now_s + duration_s, pinned))
        self.gateway_requests.setdefault(chosen.replica, []).append(self.now_s + duration_s)
        return True

    # The executor

    def _begin(self, action: Action) -> None:
        if action.replica in self.doing:
            self.broken.append(f"two actions at once on {action.replica}")
        self.doing[action.replica] = (action, self.now_s + self._start(action), self.life)

    def _start(self, action: Action) -> float:
        """Reaches the server now; how long it takes."""
        server = self.servers.get(action.replica)
        if action.kind is ActionKind.CREATE and server is None and action.spec is not None:
            self._check_exclusive(action.replica, action.spec, "created")
            self.servers[action.replica] = Server(action.spec, self.now_s, self.now_s + START_S)
            return 0.5
        if server is None or server.exited or server.silent or self.now_s < server.ready_s:
            return 0.5
        if action.kind is ActionKind.SLEEP and not server.asleep and not server.requests:
            if action.replica not in self.refuse_sleep and server.moving is None:
                server.moving = ActionKind.SLEEP
                server.move_ends_s = self.now_s + (SLEEP_S if server.slept_before else FIRST_SLEEP_S)
            return max(0.5, server.move_ends_s - self.now_s)
        if action.kind is ActionKind.WAKE and server.asleep and not server.wake_refused:
            self._check_exclusive(action.replica, server.spec, "woken")
            if server.moving is None:
                server.moving, server.move_ends_s = ActionKind.WAKE, self.now_s + WAKE_S
            return max(0.5, server.move_ends_s - self.now_s)
        return 0.5

    def _end_actions(self) -> None:
        for name, (action, end_s, life) in sorted(self.doing.items()):
            if self.now_s < end_s:
                continue
            del self.doing[name]
            outcome = self._finish(action)
            if life == self.life and self.memory is not None:
                self.outcomes.append(outcome)

    def _finish(self, action: Action) -> Outcome:
        server = self.servers.get(action.replica)
        made = replace(Outcome(kind=action.kind, replica=action.replica, ok=True))
        if action.kind is ActionKind.CREATE:
            return made
        if action.kind is ActionKind.DELETE:
            self._delete(action.replica, server)
            return made
        if server is None or server.exited or server.silent or self.now_s < server.ready_s:
            return replace(made, ok=False, error="no answer", unsettled=action.kind is ActionKind.SLEEP)
        if action.kind is ActionKind.SLEEP:
            busy = bool(server.requests) and not server.asleep and server.moving is None
            return replace(made, ok=server.asleep, busy=busy, error="" if server.asleep else "awake still")
        if action.kind is ActionKind.WAKE:
            return replace(made, ok=not server.asleep, error="refused" if server.asleep else "")
        return replace(made, ok=not (server.asleep or server.no_token), error="no token" if server.no_token else "")

    def _delete(self, name: str, server: Server | None) -> None:
        if server is not None and server.requests and not server.exited and not server.silent:
            step = next(
                (
                    s
                    for operation in (self.memory or self.stored).operations.values()
                    for s in operation.steps
                    if s.replica == name and not s.finished
                ),
                None,
            )
            if step is not None and self.now_s < step.drain_deadline_s:
                self.broken.append(f"{name} deleted with requests in flight before its deadline")
        self.servers.pop(name, None)

    # Invariants

    def _check_exclusive(self, name: str, target: Spec, what: str) -> None:
        for other in self.servers.values():
            if other.spec.replica == name or set(other.spec.gpus).isdisjoint(target.gpus):
                continue
            # A server that started by itself a moment ago cannot have been seen yet.
            unseen = self.now_s - other.restarted_s <= 2 * STEP_S
            if other.uses_memory(self.now_s) and not unseen:
                self.broken.append(f"{name} {what} while {other.spec.replica} uses its GPU")

    def _check_floors(self, old: State, new: State) -> None:
        for pool in new.pools.values():
            for floor in pool.floors:
                hidden = [
                    r.name
                    for r in new.replicas.values()
                    if r.spec.service == floor.service
                    and r.life_cycle is LifeCycle.DRAINING
                    and r.name in old.replicas
                    and old.replicas[r.name].life_cycle is LifeCycle.ACTIVE
                ]
                left = sum(1 for r in new.replicas.values() if r.spec.service == floor.service and r.routable)
                if hidden and left < floor.min_replicas:
                    self.broken.append(f"{hidden} hidden, {left} left, floor {floor.min_replicas}")

    # Faults

    def crash(self) -> None:
        """SIGKILL of the actuator: what had reached a server goes on."""
        self.memory = None
        self.outcomes.clear()
        self.life += 1
        self.doing.clear()

    def restart(self) -> None:
        """A new process on the stored records."""
        if self.memory is None:
            self.memory = resume(self.stored, now_s=self.now_s, limits=LIMITS)

    def reboot(self, name: str) -> None:
        """The server's process ends and comes up again, awake, with nothing in flight."""
        server = self.servers[name]
        self.servers[name] = Server(server.spec, self.now_s, self.now_s + START_S, restarted_s=self.now_s + START_S)

    def restart_server(self, name: str) -> None:
        """As ``reboot``, but it can come up only when its GPUs have room for it: till then it tries again and again."""
        server = self.servers[name]
        self.servers[name] = Server(server.spec, self.now_s, float("inf"), waits=True)

    def restart_fleet(self) -> None:
        """Every server at once."""
        for name in sorted(self.servers):
            self.restart_server(name)

    # What people ask

    def apply(
        self,
        revision: int,
        overlay: list[Spec],
        awake: list[str],
        *,
        token: int = 1,
        floors: tuple[Floor, ...] = (),
        drain_s: float = 5.0,
        replica_revision: int = 0,
    ) -> Operation | None:
        """ApplyPoolState."""
        assert self.memory is not None
        request = PoolRequest(
            pool="p",
            state_revision=revision,
            overlay=tuple(sorted(overlay, key=lambda item: item.replica)),
            awake=tuple(awake),
            floors=floors,
            budget_gpus=self.gpus,
            decision_id=f"d-{revision}",
            replica_revision=replica_revision,
            expire_s=self.now_s + 10,
            drain_timeout_s=drain_s,
            sleep_level=1,
            writer="policy-engine",
            token=token,
        )
        state = replace(self.memory, gateways=self._gateways(self.memory))
        answer = apply_pool_state(state, request, self.world(), now_s=self.now_s, limits=LIMITS)
        self.stored = self.memory = answer.state
        return answer.operation

    def life_cycles(self) -> dict[str, str]:
        """Life cycle by name."""
        assert self.memory is not None
        return {name: replica.life_cycle.value for name, replica in sorted(self.memory.replicas.items())}

    def until_settled(self, limit_s: float = 600.0) -> bool:
        """Runs until no operation is unfinished for two seconds."""
        quiet_s = 0.0
        end_s = self.now_s + limit_s
        while self.now_s < end_s:
            self.step()
            assert self.memory is not None
            busy = self.doing or any(not o.finished for o in self.memory.operations.values())
            quiet_s = 0.0 if busy else quiet_s + STEP_S
            if quiet_s >= 2.0:
                return True
        return False

    def operation(self, operation_id: str) -> Operation:
        """One operation."""
        assert self.memory is not None
        return self.memory.operations[operation_id]
