"""Servers and GPU memory in memory, on virtual time, with what can go wrong with each.

The servers live on when the actuator dies, so an action that had begun takes its effect although nobody hears of it.
Every action is judged at the moment when it reaches a server; what breaks an invariant is collected in ``broken``.
"""

from dataclasses import dataclass, field, replace

from actuator.core.model import ActionKind, Limits, PlacedSpec, Placement, Spec
from actuator.core.world import Action, GpuMemory, Listed, Node, Outcome, ProbeResult, RunState, World
from trimtab.domain.vocabulary import Role

STEP_S = 0.5
START_S, FIRST_SLEEP_S, SLEEP_S, WAKE_S, MEMORY_LAG_S = 3.0, 4.0, 1.0, 1.0, 2.0
PROBE_TIMEOUT_S, CANARY_TIMEOUT_S = 2.0, 5.0
AWAKE_GIB, ASLEEP_GIB = 34.0, 1.4
# Servers of this service pause nothing before they sleep, their engine just does not answer while they move; nor do
# they say how deep they sleep.
OLDER_RELEASE = "b"

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
    prewarm_after_s=3.0,
    prewarm_backoff_s=10.0,
    max_prewarm_backoff_s=80.0,
    fresh_s=3.0,
)


def spec(name: str, *gpus: int, service: str = "", node: str = "n0", pool: str = "p", group: str = "") -> PlacedSpec:
    """A one-line spec with its placement; the service is the name up to its last hyphen."""
    what = Spec(
        replica=name,
        service=service or name.rpartition("-")[0],
        role=Role.COLOCATED,
        model="m",
        profile="",
        pool=pool,
        group=group,
    )
    return PlacedSpec(spec=what, placement=Placement(node=node, gpu_indices=gpus))


def changed(placed: PlacedSpec, **fields: object) -> PlacedSpec:
    """The same replica at the same place, with other fields of its spec."""
    return replace(placed, spec=replace(placed.spec, **fields))


def parts(placed: PlacedSpec) -> dict[str, object]:
    """Fields of a Replica or a Listed."""
    return {"spec": placed.spec, "placement": placed.placement}


@dataclass
class Request:
    """One request on a server. ``gateway`` is empty for one that came past every gateway."""

    end_s: float
    pinned: bool = False
    gateway: str = ""


@dataclass
class Server:
    """One simulated vLLM server."""

    placed: PlacedSpec
    started_s: float
    ready_s: float
    asleep: bool = False
    slept_before: bool = False
    moving: ActionKind | None = None
    move_ends_s: float = 0.0
    memory_free_s: float = 0.0
    exited: bool = False
    # It hangs: it answers nothing, and whatever it was doing stands still.
    silent: bool = False
    wake_refused: bool = False
    sleep_refused: bool = False
    # Its engine is wedged: /health answers, no token comes.
    no_token: bool = False
    paused: bool = False
    # Somebody else put it to sleep.
    by_others: bool = False
    # Its next sleep takes so much longer.
    slow_sleep_s: float = 0.0
    restarted_s: float = -100.0
    # Not up yet: others have the memory of its GPUs.
    waits: bool = False
    # How deep it sleeps, and whether its GPUs hold its model's weights.
    level: int = 0
    has_weights: bool = True
    # A token came since it was last put to sleep.
    proved: bool = False
    waiting: int | None = 0
    kv_usage: float | None = 0.0
    requests: list[Request] = field(default_factory=list)

    def up(self, now_s: float) -> bool:
        """It answers."""
        return not self.exited and not self.silent and now_s >= self.ready_s

    def uses_memory(self, now_s: float) -> bool:
        """Awake, on the way, or asleep and not yet let go."""
        return not self.exited and not self.waits and (not self.asleep or now_s < self.memory_free_s)

    def heal(self) -> None:
        """Whatever hung, refused or was wedged works again. A dead process stays dead."""
        self.silent = self.wake_refused = self.sleep_refused = self.no_token = self.paused = False
        self.slow_sleep_s = 0.0


@dataclass
class Doing:
    """An action under way. ``server`` is the one that it reached, None when it reached none."""

    action: Action
    begin_s: float
    server: Server | None
    # What is known of its end from the beginning; None when the server's progress decides.
    outcome: Outcome | None = None
    outcome_s: float = 0.0
    # The outcome comes so much later than the effect.
    late_s: float = 0.0


class Fleet:
    """Every server of a cluster with one node."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self._nodes = {"n0": Node(node="n0", vdc="v", s2="s2", s1="s1", gpu_type="A100", gpus=gpus)}
        self.now_s = 1_000.0
        self.servers: dict[str, Server] = {}
        self.misses: dict[str, int] = {}
        self.broken: list[str] = []
        # Answers of the backend to the next creations and deletions, and of servers to the next wakes: error texts.
        self.backend_errors: list[str] = []
        self.wake_errors: list[str] = []

    # What can be seen

    def look(self, busy: frozenset[str] = frozenset()) -> World:
        """Everything as it is now."""
        listed = {
            name: Listed(
                **parts(server.placed),
                address=f"http://{name}",
                run_state=RunState.EXITED if server.exited else RunState.RUNNING,
                start_time_s=server.started_s,
            )
            for name, server in self.servers.items()
        }
        return World(
            listed=listed,
            listed_as_of_s=self.now_s,
            nodes=self._nodes,
            gpu_memory={
                ("n0", index): GpuMemory(used_gib=self._used(index), memory_gib=40.0, as_of_s=self.now_s)
                for index in range(self.gpus)
            },
            measures_gpus=True,
            probes={name: self._sight(name, server) for name, server in sorted(self.servers.items())},
            busy=busy,
        )

    def _sight(self, name: str, server: Server) -> ProbeResult:
        if not server.up(self.now_s):
            return ProbeResult(
                as_of_s=self.now_s, healthy=False, misses=self.misses.get(name, 0) + 1, refused=not server.silent
            )
        if server.moving is not None and server.placed.service == OLDER_RELEASE:
            return ProbeResult(as_of_s=self.now_s, healthy=True, error="/is_sleeping does not answer")
        # It stops its scheduler first, and gives its memory up last.
        falling_asleep = server.moving is ActionKind.SLEEP and not server.asleep
        says_level = server.asleep and server.moving is None and server.placed.service != OLDER_RELEASE
        return ProbeResult(
            as_of_s=self.now_s,
            healthy=True,
            sleeping=server.asleep or server.paused or falling_asleep,
            paused=server.paused or falling_asleep,
            in_flight=0 if server.asleep else len(server.requests),
            waiting=server.waiting,
            kv_usage=server.kv_usage,
            sleep_level=server.level if says_level else None,
        )

    def _used(self, index: int) -> float:
        on_gpu = [
            server for server in self.servers.values() if ("n0", index) in server.placed.gpus and not server.exited
        ]
        on_gpu = [server for server in on_gpu if not server.waits]
        return sum(AWAKE_GIB if server.uses_memory(self.now_s) else ASLEEP_GIB for server in on_gpu)

    # Time

    def step(self) -> None:
        """Half a second."""
        self.now_s += STEP_S
        for name in sorted(self.servers):
            server = self.servers[name]
            self._move_on(server)
            self.misses[name] = 0 if server.up(self.now_s) else self.misses.get(name, 0) + 1
        for name in sorted(self.servers):
            self._claim_memory(self.servers[name])

    def _move_on(self, server: Server) -> None:
        if server.exited:
            server.requests.clear()
        server.requests = [item for item in server.requests if item.end_s > self.now_s]
        if server.silent:
            server.move_ends_s += STEP_S
        if server.moving is None or self.now_s < server.move_ends_s or server.exited:
            return
        server.by_others = False
        if server.moving is ActionKind.SLEEP:
            server.asleep = server.slept_before = True
            server.proved = False
            server.memory_free_s = self.now_s + MEMORY_LAG_S
            server.has_weights = server.has_weights and server.level == 1
        else:
            server.asleep = False
            server.has_weights = server.has_weights or server.level == 2
        server.moving = None

    def _claim_memory(self, server: Server) -> None:
        """One that waits takes its GPUs as soon as nobody uses them; the first by name comes first."""
        rivals = (
            o
            for o in self.servers.values()
            if o is not server and not set(o.placed.gpus).isdisjoint(server.placed.gpus)
        )
        if server.waits and not any(other.uses_memory(self.now_s) for other in rivals):
            server.waits, server.ready_s, server.restarted_s = False, self.now_s + START_S, self.now_s

    # Actions

    def begin(self, action: Action) -> Doing:
        """Reaches the server, or the backend, now."""
        server = self.servers.get(action.replica)
        doing = Doing(action=action, begin_s=self.now_s, server=server, outcome_s=self.now_s + STEP_S)
        if action.kind in (ActionKind.CREATE, ActionKind.DELETE):
            doing.outcome = self._ask_backend(action)
        elif server is None or server.exited or self.now_s < server.ready_s:
            doing.outcome = failed(action, "refused")
        elif server.silent:
            doing.outcome, doing.outcome_s = failed(action, "no answer"), self.now_s + PROBE_TIMEOUT_S
        elif action.kind is ActionKind.SLEEP:
            doing.outcome = self._ask_sleep(action, server)
        elif action.kind is ActionKind.WAKE:
            doing.outcome = self._ask_wake(action, server)
        elif server.no_token or server.asleep or server.moving is not None or server.paused:
            doing.outcome, doing.outcome_s = failed(action, "no token"), self.now_s + CANARY_TIMEOUT_S
        else:
            doing.outcome = Outcome(kind=action.kind, replica=action.replica, ok=True)
            server.proved = True
            if not server.has_weights:
                self.broken.append(f"{action.replica} is asked for a token without its weights")
        return doing

    def _ask_backend(self, action: Action) -> Outcome:
        if self.backend_errors:
            return failed(action, self.backend_errors.pop(0))
        if action.kind is ActionKind.DELETE:
            self.servers.pop(action.replica, None)
        elif action.replica not in self.servers and action.placed is not None:
            self._check_exclusive(action.replica, action.placed, "created")
            self.servers[action.replica] = Server(action.placed, self.now_s, self.now_s + START_S)
        return Outcome(kind=action.kind, replica=action.replica, ok=True)

    def _ask_sleep(self, action: Action, server: Server) -> Outcome | None:
        if server.asleep and server.moving is None:
            return Outcome(kind=action.kind, replica=action.replica, ok=True)
        if server.requests:
            return Outcome(kind=action.kind, replica=action.replica, ok=False, busy=True, error="in flight")
        if server.sleep_refused:
            return failed(action, "500")
        if server.moving is None:
            server.moving, server.level = ActionKind.SLEEP, action.sleep_level
            took_s = SLEEP_S if server.slept_before else FIRST_SLEEP_S
            server.move_ends_s = self.now_s + took_s + server.slow_sleep_s
        return None

    def _ask_wake(self, action: Action, server: Server) -> Outcome | None:
        if self.wake_errors:
            return failed(action, self.wake_errors.pop(0))
        if not server.asleep and server.moving is None:
            # At level 2 the weights are loaded again, whether it slept or not.
            server.has_weights = server.has_weights or action.sleep_level == 2
            return Outcome(kind=action.kind, replica=action.replica, ok=True)
        if server.wake_refused:
            return failed(action, "refused to wake")
        self._check_exclusive(action.replica, server.placed, "woken")
        if server.moving is None:
            server.moving, server.move_ends_s = ActionKind.WAKE, self.now_s + WAKE_S
            # The weights are loaded again, or what it lost stays lost, whatever the level that it slept at last.
            server.level = action.sleep_level
        return None

    def ended(self, doing: Doing) -> Outcome | None:
        """What came of the action; None while it is under way."""
        if doing.outcome is None:
            doing.outcome = self._progress(doing)
            doing.outcome_s = self.now_s
        return doing.outcome if self.now_s >= doing.outcome_s + doing.late_s else None

    def _progress(self, doing: Doing) -> Outcome | None:
        action, sleeps = doing.action, doing.action.kind is ActionKind.SLEEP
        server = self.servers.get(action.replica)
        if server is None or server is not doing.server or server.exited:
            return failed(action, "connection reset", unsettled=True)
        if server.up(self.now_s) and server.moving is None and server.asleep is sleeps:
            return Outcome(kind=action.kind, replica=action.replica, ok=True)
        limit_s = LIMITS.sleeping_s if sleeps else LIMITS.reactivating_s
        if self.now_s - doing.begin_s >= limit_s:
            return failed(action, "not done in time", unsettled=sleeps)
        return None

    def _check_exclusive(self, name: str, target: PlacedSpec, what: str) -> None:
        for other in self.servers.values():
            if other.placed.replica == name or set(other.placed.gpus).isdisjoint(target.gpus):
                continue
            # A server that started by itself a moment ago cannot have been seen yet.
            unseen = self.now_s - other.restarted_s <= self.blind_s
            if other.uses_memory(self.now_s) and not unseen:
                self.broken.append(f"{name} {what} while {other.placed.replica} uses its GPU")

    # Looks may be so old.
    blind_s = 2 * STEP_S

    # Faults

    def sleep_by_hand(self, name: str) -> None:
        """Somebody else puts it to sleep; what it was doing is lost."""
        server = self.servers[name]
        server.asleep = server.slept_before = server.by_others = True
        server.proved = False
        server.moving = None
        server.requests.clear()

    def wake_by_hand(self, name: str) -> None:
        """Somebody else wakes it, whoever uses its GPUs."""
        server = self.servers[name]
        server.asleep, server.moving, server.restarted_s = False, None, self.now_s

    def reboot(self, name: str) -> None:
        """The server's process ends and comes up again, awake, with nothing in flight."""
        server = self.servers[name]
        self.servers[name] = Server(server.placed, self.now_s, self.now_s + START_S, restarted_s=self.now_s + START_S)

    def restart_server(self, name: str) -> None:
        """As ``reboot``, but it can come up only when its GPUs have room for it: till then it tries again and again."""
        server = self.servers[name]
        self.servers[name] = Server(server.placed, self.now_s, float("inf"), waits=True)


def failed(action: Action, error: str, *, unsettled: bool = False) -> Outcome:
    """An action that came to nothing."""
    return Outcome(kind=action.kind, replica=action.replica, ok=False, error=error, unsettled=unsettled)
