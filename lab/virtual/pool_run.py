"""One pool, one trace, one controller, on virtual time, from the first arrival to the last answer.

Collector cores scrape the servers and close windows, the controller decides at its pace, the actuator's core carries
out, the gateway's core routes. Everything is a function of the arguments: equal arguments give equal results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from actuator.core.admission_pool import specs_of
from actuator.core.listing import listed_operation
from actuator.core.model import Limits, OperationKind, OperationState, PlacedSpec, StepKind
from actuator.core.world import Node
from lab.virtual.actuation import ActuatorPace, VirtualActuator, gpu_ids
from lab.virtual.control import Controller, MemberScore, PoolDesk, PoolLook
from lab.virtual.gateway import CLUSTER, VirtualGateway
from lab.virtual.observing import VirtualCollector
from lab.virtual.result import RunResult, TimelinePoint
from lab.virtual.servers import VirtualServers
from lab.virtual.serving import Serving
from policy_engine.core.pool.desired import desired_pool
from policy_engine.core.pool.initial_layout import LayoutInput, lay_out
from policy_engine.core.shared.vocabulary import MemberKey
from simulator.core.memory import GpuId
from simulator.core.profile import Profile
from simulator.core.requests import FinishedRequest
from simulator.traces.model import TraceRequest
from trimtab.config.resources import Pool, ServicePolicy

START_S = 10.0
"""When a trace begins on the run's clock: by then servers are taken up and windows are full."""
EARLY_S = 0.05
"""How soon the controller has its turn after an operation has ended."""
FIRST_DECISION = "d-birth"
_COUNTED = {StepKind.WAKE: "wakes", StepKind.RELEASE: "releases"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WindowPace:
    """Delays after the end of a window, at which all is done by default, as between processes."""

    scrape_s: float = 0.0
    """So long before it servers are read."""
    report_s: float = 0.0
    """So long before it gateways report arrivals; not longer than `scrape_s`."""
    turn_s: float = 0.0
    """So long after it the controller has its turn."""

    def __post_init__(self) -> None:
        if not 0 <= self.report_s <= self.scrape_s or self.turn_s < 0:
            raise ValueError(f"{self}: scrape_s is at least report_s, and nothing is negative")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolSetup:
    """A pool and all that does not depend on its controller. `profiles` has one for each member's `profile` name."""

    pool: Pool
    policies: tuple[ServicePolicy, ...]
    profiles: Mapping[str, Profile]
    gpu_memory_gib: float
    gpu_type: str = "A100"
    first_sleeps_done: bool = True
    """Whether every server has slept once before the trace begins, so that no first, slow sleep falls into it."""
    lost_sleepers: frozenset[str] = frozenset()
    """Sleepers whose servers have died when the run begins, by the names of the pool's overlay."""
    window_s: float = 5.0
    scrape_s: float = 1.0
    limits: Limits = dataclasses.field(default_factory=Limits)
    pace: ActuatorPace = dataclasses.field(default_factory=ActuatorPace)
    window_pace: WindowPace = dataclasses.field(default_factory=WindowPace)
    timeline_s: float = 5.0

    def with_awake(self, counts: Mapping[str, int]) -> PoolSetup:
        """The same pool with other counts at its start, by service."""
        members = tuple(
            member.model_copy(update={"initial_awake": counts.get(member.service, member.initial_awake)})
            for member in self.pool.spec.members
        )
        spec = self.pool.spec.model_copy(update={"members": members})
        return dataclasses.replace(self, pool=self.pool.model_copy(update={"spec": spec}))


class PoolRun:
    """The pieces of one run, wired to each other."""

    def __init__(self, setup: PoolSetup, controller: Controller) -> None:
        self.setup = setup
        self.controller = controller
        birth = lay_out(LayoutInput(setup.pool, setup.policies))
        desired = desired_pool(setup.pool, setup.policies, birth.overlay, birth.awake, FIRST_DECISION, state_revision=1)
        specs, awake = specs_of(desired), desired.awake
        lost = setup.lost_sleepers
        if not lost <= {spec.replica for spec in specs}.difference(awake):
            raise ValueError(f"lost_sleepers {sorted(lost)}: each has to be asleep when the pool is born")
        gpus = {gpu for spec in specs for gpu in gpu_ids(spec)}
        services = [policy.name for policy in setup.policies]
        self.gateway = VirtualGateway(services)
        self.servers = VirtualServers(dict.fromkeys(sorted(gpus), setup.gpu_memory_gib), self._finished)
        self.gateway.connect(self.servers)
        self.collector = VirtualCollector(window_s=setup.window_s, interval_s=setup.scrape_s)
        self.serving = Serving(
            self.gateway, self.servers, self.collector, services=services, timeline_s=setup.timeline_s
        )
        # Servers that are to sleep are placed first: an awake server leaves no room for another that is awake.
        for placed in sorted(specs, key=lambda placed: (placed.replica in awake, placed.replica)):
            self.servers.place(
                placed.replica,
                service=placed.service,
                role=placed.role,
                profile=setup.profiles[placed.spec.profile],
                gpus=gpu_ids(placed),
                awake=placed.replica in awake,
                slept_before=setup.first_sleeps_done,
            )
            self._created(placed)
        self.actuator = VirtualActuator(
            self.servers,
            self.gateway,
            nodes=_nodes(setup, gpus),
            specs=specs,
            profiles=setup.profiles,
            limits=setup.limits,
            pace=setup.pace,
            on_change=self._early,
            on_created=self._created,
            on_deleted=self._deleted,
        )
        self.desk = PoolDesk(setup.pool, setup.policies, desired, self.actuator)
        self.timeline: list[TimelinePoint] = []
        self._members = tuple(sorted(set(self.desk.members.values())))
        self._seen_ends = 0
        self._early_due = False
        self.energy_kwh: float | None = None
        self._moved = {"wakes": 0, "releases": 0, "transitions": 0, "failed": 0}

    def run(self, requests: Iterable[TraceRequest], *, duration_s: float, grace_s: float) -> None:
        """Serve a trace; for `grace_s` after `duration_s` what is left may end. Call once."""
        clock = self.servers.clock
        self.actuator.start()
        self.desk.publish()
        for name in sorted(self.setup.lost_sleepers):
            self.servers.remove(name)
            self._deleted(name)
        self.actuator.kick()
        self._then(self.setup.scrape_s - self.setup.window_pace.scrape_s, self._read)
        clock.run_before(START_S)
        self.serving.serve(requests, start_s=START_S, duration_s=duration_s)
        self.energy_kwh = self.servers.energy_kwh(duration_s)
        self.serving.let_end(grace_s)

    def result(self, *, policy: str, trace: str, seed: int, duration_s: float) -> RunResult:
        """What is left of the run."""
        columns = self.gateway.columns()
        return RunResult(
            policy=policy,
            trace=trace,
            seed=seed,
            requests=columns.since(START_S),
            timeline=tuple(self.timeline),
            duration_s=duration_s,
            gpu_hours=self.serving.gpu_hours,
            energy_kwh=self.energy_kwh,
            wakes=self._moved["wakes"],
            releases=self._moved["releases"],
            transitions=self._moved["transitions"],
            counts={
                "reissued": float(columns.reissued.sum()),
                "refused": float(len(self.desk.refused)),
                "failed transitions": float(self._moved["failed"]),
            },
        )

    def _read(self, now_s: float) -> None:
        """One scrape; the gateway's report and the controller's turn on the window follow."""
        pace = self.setup.window_pace
        end_s = now_s + pace.scrape_s
        self.serving.read(now_s, windows=self.controller.reads_windows, sleepers=True, end_s=end_s)
        self._then(end_s - pace.report_s, self.serving.hear)
        self._then(end_s + pace.turn_s, self._turn)
        if self.serving.goes_on(now_s):
            self.servers.clock.call_at(now_s + self.setup.scrape_s, self._read)

    def _then(self, at_s: float, call: Callable[[float], None]) -> None:
        """At once where that is now."""
        now_s = self.servers.clock.now_s
        if at_s <= now_s:
            call(now_s)
        else:
            self.servers.clock.call_at(at_s, call)

    def _early(self) -> None:
        """An operation has ended, which frees its pool: the controller need not wait for its next beat."""
        if not self._early_due:
            self._early_due = True
            self.servers.clock.call_at(self.servers.clock.now_s + EARLY_S, self._early_turn)

    def _early_turn(self, now_s: float) -> None:
        self._early_due = False
        self._turn(now_s)

    def _turn(self, now_s: float) -> None:
        self._follow(now_s)
        look = self._look(now_s)
        self.controller.tick(look, self.desk)
        if self.serving.point_due(now_s):
            self._draw(now_s, look)

    def _follow(self, now_s: float) -> None:
        """Pass the outcomes of its operations to the controller."""
        ended = self.actuator.operations_ended
        while self._seen_ends < len(ended):
            operation = ended[self._seen_ends]
            self._seen_ends += 1
            if operation.kind is OperationKind.TRANSITION:
                succeeded = operation.state is OperationState.SUCCEEDED
                self._moved["transitions"] += 1
                self._moved["failed"] += not succeeded
                for step in operation.steps:
                    if succeeded and step.kind in _COUNTED:
                        self._moved[_COUNTED[step.kind]] += 1
            self.controller.ended(listed_operation(operation, cluster=CLUSTER), now_s, self.desk)

    def _look(self, now_s: float) -> PoolLook:
        replicas = {item.replica: item for item in self.actuator.listed_replicas()}
        routable: dict[MemberKey, list[str]] = {key: [] for key in self._members}
        for name, item in replicas.items():
            if item.routable:
                routable[self.desk.members[name]].append(name)
        views, fronts = self.collector.signals(now_s, routable)
        return PoolLook(
            now_s=now_s,
            views=views,
            fronts=fronts,
            replicas=replicas,
            samples=self.serving.samples,
            traffic=self.serving.traffic(now_s),
        )

    def _draw(self, now_s: float, look: PoolLook) -> None:
        scores = self.controller.scores()
        awake: dict[MemberKey, int] = dict.fromkeys(self._members, 0)
        for name in self.desk.awake:
            awake[self.desk.members[name]] += 1
        for key in self._members:
            names = [name for name, facts in look.replicas.items() if self.desk.members[name] == key]
            samples = [look.samples[name] for name in names if name in look.samples]
            self.timeline.append(
                TimelinePoint(
                    at_s=now_s - START_S,
                    service=key.service,
                    role=key.role.value,
                    desired=awake[key],
                    routable=sum(1 for name in names if look.replicas[name].routable),
                    running=float(sum(sample.running for sample in samples)),
                    waiting=float(sum(sample.waiting for sample in samples) + self.gateway.held(key.service)),
                    z=scores.get(key, MemberScore()).z,
                )
            )

    def _created(self, placed: PlacedSpec) -> None:
        self.collector.add(placed.replica, placed.service, placed.role, len(placed.placement.gpu_indices))

    def _deleted(self, name: str) -> None:
        self.collector.remove(name)
        self.serving.forget(name)

    def _finished(self, index: int, finished: FinishedRequest) -> None:
        server = self.servers.by_index[index]
        server.recorder.finished(finished)
        self.serving.tallies[server.service].ended(finished)
        if self.gateway.finished(finished):
            self.actuator.kick()


def run_pool(
    setup: PoolSetup,
    requests: Iterable[TraceRequest],
    controller: Controller,
    *,
    policy: str,
    trace: str,
    seed: int,
    duration_s: float,
    grace_s: float = 600.0,
) -> RunResult:
    """One run; what is not answered `grace_s` after the trace's end stays unanswered. Raises ValueError for a pool
    that cannot be laid out or a request of a service that it does not have.
    """
    run = PoolRun(setup, controller)
    run.run(requests, duration_s=duration_s, grace_s=grace_s)
    return run.result(policy=policy, trace=trace, seed=seed, duration_s=duration_s)


def _nodes(setup: PoolSetup, gpus: Iterable[GpuId]) -> list[Node]:
    counts: dict[str, int] = {}
    for gpu in gpus:
        counts[gpu.node] = max(counts.get(gpu.node, 0), gpu.index + 1)
    return [
        Node(node=name, vdc="vdc-0", s2="s2-0", s1="s1-0", gpu_type=setup.gpu_type, gpus=counts[name])
        for name in sorted(counts)
    ]
