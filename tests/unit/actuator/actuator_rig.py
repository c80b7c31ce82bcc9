"""A cluster in memory, on virtual time: servers, GPU memory, gateways, a store, an actuator that can die.

The actuator can die after any part of a round: before its state is stored, after it, after some of its actions. What
breaks an invariant is collected in ``broken``.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle

from actuator.core.admission_pool import PoolRequest, apply_pool_state
from actuator.core.cancelling import cancel_operation
from actuator.core.endpoints import endpoints_of
from actuator.core.model import ActionKind, Floor, Operation, PlacedSpec, State
from actuator.core.model import Gateway as Statement
from actuator.core.tick import Tick, fail_static, resume, tick
from actuator.core.world import Action, Outcome, World
from tests.unit.actuator.actuator_fleet_model import LIMITS, STEP_S, Doing, Fleet, Request, Server, spec
from tests.unit.actuator.actuator_gateway_model import Gateway
from tests.unit.actuator.actuator_invariants import broken_by
from trimtab.domain.member import MemberKey
from trimtab.domain.pool import DesiredPool, OverlayReplica
from trimtab.domain.vocabulary import LifeCycle

__all__ = ["LIMITS", "STEP_S", "Gateway", "Request", "Rig", "Server", "overlay_of", "spec"]

MAX_LOOK_LAG = 3


def overlay_of(specs: Iterable[PlacedSpec]) -> tuple[OverlayReplica, ...]:
    """The overlay in which these replicas live where they do."""
    return tuple(
        OverlayReplica(
            replica=item.replica,
            member=MemberKey(item.service, item.role),
            model=item.spec.model,
            profile=item.spec.profile,
            node=item.node,
            gpu_indices=item.placement.gpu_indices,
        )
        for item in specs
    )


class Rig:
    """The cluster and one actuator."""

    def __init__(self, gpus: int = 2, gateways: tuple[str, ...] = ("g",)) -> None:
        self.fleet = Fleet(gpus)
        # By their places: who replaces a dead one has another name.
        self.gateways = {name: Gateway(name) for name in gateways}
        self.gateway = self.gateways[gateways[0]]
        self._gateways_made = len(gateways)
        self.stored = State()
        self.memory: State | None = resume(State(), now_s=self.now_s, limits=LIMITS)
        self.store_away = False
        self.doing: dict[str, Doing] = {}
        self.outcomes: list[Outcome] = []
        self.lost_requests = 0
        # Services that the gateways send requests to all the time, in bursts and not at once.
        self.traffic: tuple[str, ...] = ()
        self.revisions: list[int] = []
        # After so many rounds each gateway finds a new actuator.
        self.reconnects_after: tuple[int, ...] = (0,)
        # What happens by itself later, with its time.
        self._later: list[tuple[float, Callable[[], object]]] = []
        # How many rounds old the newest look is.
        self.look_lag = 0
        self._looks: deque[World] = deque(maxlen=MAX_LOOK_LAG + 1)
        # How many actions of the next round are begun before the actuator dies; -1: it dies before the state is stored.
        self.dies_after: int | None = None
        # The store goes away at the next write; True: the write lands all the same.
        self.store_breaks: bool | None = None

    @property
    def now_s(self) -> float:
        return self.fleet.now_s

    @property
    def servers(self) -> dict[str, Server]:
        return self.fleet.servers

    @property
    def broken(self) -> list[str]:
        return self.fleet.broken

    # What the actuator sees

    def world(self) -> World:
        """The newest look, which may be some rounds old."""
        return self.fleet.look(frozenset(self.doing)) if self.look_lag == 0 or not self._looks else self._seen()

    def _seen(self) -> World:
        """As ``world``; without a delay it is the look of this round."""
        seen = self._looks[-1 - self.look_lag if len(self._looks) > self.look_lag else -1]
        busy = frozenset(self.doing)
        return seen if seen.busy == busy else replace(seen, busy=busy)

    # Time

    def step(self) -> None:
        """Half a second: servers, gateways, actuator."""
        self.fleet.step()
        due = [happens for at_s, happens in self._later if at_s <= self.now_s]
        self._later = [item for item in self._later if item[0] > self.now_s]
        for happens in due:
            happens()
        self._end_actions()
        endpoints = endpoints_of(self.memory.replicas) if self.memory is not None else ()
        for offset, (where, gateway) in enumerate(self.gateways.items()):
            gateway.forget_ended(self.servers, self.now_s)
            if self.memory is not None:
                gateway.take_up(self.memory.meta.endpoint_revision, endpoints, self.servers)
            place = (int(self.now_s / STEP_S) + 5 * offset) % 10
            for service in self.traffic if place < 3 else ():
                self.send(service, (0.5, 1.0, 1.5)[place], gateway=where)
        self._looks.append(self.fleet.look(frozenset(self.doing)))
        if self.memory is not None:
            self._actuator_round(self.memory)

    def later(self, seconds: float, happens: Callable[[], object]) -> None:
        """Lets something happen by itself."""
        self._later.append((self.now_s + seconds, happens))

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """What was to happen by itself meanwhile happens afterwards."""
        put_off, self._later = self._later, []
        yield
        self._later = put_off + self._later

    def forget_later(self) -> None:
        """Nothing happens by itself any more."""
        self._later.clear()

    def run(self, seconds: float) -> None:
        """Several steps."""
        for _ in range(round(seconds / STEP_S)):
            self.step()

    def _actuator_round(self, state: State) -> None:
        told = self._told(state)
        if self.store_away:
            self.outcomes.clear()
            result = fail_static(told, self._seen(), now_s=self.now_s, limits=LIMITS)
            self.broken.extend(broken_by(state, result.state))
            self.broken.extend(_hidden_still(result.state))
            self._take(result)
            if self.dies_after is not None:
                self.dies_after = None
                self.crash()
            return
        outcomes, self.outcomes = self.outcomes, []
        result = tick(told, self._seen(), outcomes, now_s=self.now_s, limits=LIMITS)
        self.broken.extend(broken_by(state, result.state))
        self._check_proved(state, result.state)
        dies_after, self.dies_after = self.dies_after, None
        if self.store_breaks is not None:
            if self.store_breaks:
                self.stored = result.state
            self.outcomes = [*outcomes, *self.outcomes]
            self.store_breaks, self.store_away = None, True
            return
        if dies_after != -1:
            self.stored = result.state
            self._take(result)
            for action in result.actions if dies_after is None else result.actions[:dies_after]:
                self._begin(action)
        if dies_after is not None:
            self.crash()

    def _take(self, result: Tick) -> None:
        self.memory = result.state
        self.revisions.append(result.state.meta.endpoint_revision)

    def _check_proved(self, old: State, new: State) -> None:
        """Nothing is shown before a token came from it."""
        for name, replica in new.replicas.items():
            before, server = old.replicas.get(name), self.servers.get(name)
            newly = replica.routable and before is not None and not before.routable
            if newly and server is not None and server.up(self.now_s) and not server.asleep and not server.proved:
                unseen = self.now_s - server.started_s <= self.fleet.blind_s + STEP_S
                self.broken.extend([] if unseen else [f"{name} is shown, and no token came from it"])

    def _told(self, state: State) -> State:
        """With what the gateways have said."""
        known: dict[str, Statement] = dict(state.gateways)
        for gateway in self.gateways.values():
            said = gateway.statement(self.now_s + LIMITS.gateway_lease_s)
            if said is not None:
                known[gateway.name] = said
        return replace(state, gateways=known)

    # Requests

    def send(self, service: str, duration_s: float, *, pinned: bool = False, gateway: str = "") -> bool:
        """One request through a gateway; False when it holds the request."""
        sender = self.gateways[gateway] if gateway else self.gateway
        chosen = sender.choose(service)
        if chosen is None:
            return False
        server = self.servers.get(chosen.replica)
        if server is None or server.exited or self.now_s < server.ready_s:
            self.lost_requests += 1
            return False
        if (server.asleep or server.moving is not None) and not server.by_others:
            self.broken.append(f"request to {chosen.replica}, which sleeps or moves ({server.moving})")
        record = self.memory.replicas.get(chosen.replica) if self.memory is not None else None
        if record is not None and not record.routable and sender.revision >= record.hidden_revision > 0:
            self.broken.append(f"{sender.name} sends to {chosen.replica} by a revision that hides it")
        request = Request(self.now_s + duration_s, pinned, sender.name)
        server.requests.append(request)
        sender.requests.setdefault(chosen.replica, []).append(request)
        return True

    # The executor

    def _begin(self, action: Action) -> None:
        if action.replica in self.doing:
            self.broken.append(f"two actions at once on {action.replica}")
        server = self.servers.get(action.replica)
        if server is not None and server.up(self.now_s) and not server.asleep and server.moving is None:
            self._check_idle(action, server)
        self.doing[action.replica] = self.fleet.begin(action)

    def _check_idle(self, action: Action, server: Server) -> None:
        """Nothing sleeps under a request of a gateway's; nothing is deleted under one before its deadline."""
        running = sum(1 for request in server.requests if request.gateway)
        if not running or action.kind not in (ActionKind.SLEEP, ActionKind.DELETE):
            return
        steps = [s for o in self.stored.operations.values() for s in o.steps if s.replica == action.replica]
        deadlines_s = [step.drain_deadline_s for step in steps if not step.finished]
        if action.kind is ActionKind.SLEEP or not deadlines_s or self.now_s < max(deadlines_s):
            self.broken.append(f"{action.kind} of {action.replica} with {running} requests in flight")

    def _end_actions(self) -> None:
        for name, doing in sorted(self.doing.items()):
            outcome = self.fleet.ended(doing)
            if outcome is not None:
                del self.doing[name]
                self.outcomes.append(replace(outcome, action=doing.action))

    # Faults

    def crash(self) -> None:
        """SIGKILL of the actuator: what had reached a server goes on."""
        self.memory = None
        self.outcomes.clear()
        self.doing.clear()

    def restart(self) -> None:
        """A new process on the stored records."""
        if self.memory is None:
            self.memory = resume(self.stored, now_s=self.now_s, limits=LIMITS)
            # It has looks of its own only.
            self._looks.clear()
            for gateway, after in zip(self.gateways.values(), cycle(self.reconnects_after), strict=False):
                gateway.cut_off = max(gateway.cut_off, after)

    def replace_gateway(self, place: str) -> None:
        """A new one in a dead one's place, under another name; it knows nothing yet."""
        self._gateways_made += 1
        self.gateways[place] = Gateway(f"{place}-{self._gateways_made}")

    def add_gateway(self, name: str) -> Gateway:
        """One more, which is told the set that is shown now."""
        assert self.memory is not None
        gateway = self.gateways[name] = Gateway(name)
        gateway.take_up(self.memory.meta.endpoint_revision, endpoints_of(self.memory.replicas), self.servers)
        return gateway

    def lose_outcome(self, name: str) -> None:
        """The task that carried the action out was cut short: nobody hears what came of it."""
        self.doing.pop(name, None)

    def delay_looks(self, rounds: int) -> None:
        """From now on what is seen is so many rounds old."""
        self.look_lag = rounds
        self.fleet.blind_s = (2 + rounds) * STEP_S

    def reboot(self, name: str) -> None:
        """The server's process ends and comes up again, awake, with nothing in flight."""
        self.fleet.reboot(name)

    def restart_server(self, name: str) -> None:
        """As ``reboot``, but it can come up only when its GPUs have room for it."""
        self.fleet.restart_server(name)

    def restart_fleet(self) -> None:
        """Every server at once."""
        for name in sorted(self.servers):
            self.restart_server(name)

    # What people ask

    def apply(
        self,
        revision: int,
        overlay: list[PlacedSpec],
        awake: list[str],
        *,
        token: int = 1,
        floors: tuple[Floor, ...] = (),
        drain_s: float = 5.0,
        replica_revision: int = 0,
        sleep_level: int = 1,
        decision_id: str = "",
        prewarm: bool = False,
        residence_s: float = 0.0,
        budget_gpus: int = 0,
    ) -> Operation | None:
        """ApplyPoolState; without ``decision_id`` each revision is a decision of its own."""
        assert self.memory is not None
        desired = DesiredPool(
            pool="p",
            state_revision=revision,
            overlay=overlay_of(overlay),
            awake=tuple(awake),
            floors=floors,
            budget_gpus=budget_gpus or self.fleet.gpus,
            decision_id=decision_id or f"d-{revision}",
            replica_revision=replica_revision,
            expires_s=self.now_s + 10,
            drain_timeout_s=drain_s,
            sleep_level=sleep_level,
            prewarm=prewarm,
            residence_s=residence_s,
        )
        request = PoolRequest(desired=desired, writer="policy-engine", token=token)
        answer = apply_pool_state(self._told(self.memory), request, self.world(), now_s=self.now_s, limits=LIMITS)
        self.stored = self.memory = answer.state
        return answer.operation

    def cancel(self, operation_id: str, reason: str = "") -> Operation:
        """CancelOperation."""
        assert self.memory is not None
        told = self._told(self.memory)
        state, operation = cancel_operation(told, operation_id, reason, self.world(), now_s=self.now_s, limits=LIMITS)
        self.stored = self.memory = state
        return operation

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

    def until_idle(self, limit_s: float) -> None:
        """Runs until nothing is under way, or the time is over."""
        end_s = self.now_s + limit_s
        busy = True
        while busy and self.now_s < end_s:
            self.step()
            unfinished = self.memory is None or any(not o.finished for o in self.memory.operations.values())
            busy = unfinished or bool(self.doing)

    def operation(self, operation_id: str) -> Operation:
        """One operation."""
        assert self.memory is not None
        return self.memory.operations[operation_id]


def _hidden_still(state: State) -> list[str]:
    """What a release keeps hidden while the store is away, and was not asked to sleep."""
    return [
        f"{step.replica} stays hidden while the store is away"
        for operation in state.operations.values()
        for step in operation.steps
        if not step.finished
        and step.asked is not ActionKind.SLEEP
        and step.replica in state.replicas
        and state.replicas[step.replica].life_cycle is LifeCycle.DRAINING
        and state.replicas[step.replica].told_to_sleep is None
    ]
