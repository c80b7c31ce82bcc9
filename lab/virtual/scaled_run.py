"""A scaled service on virtual time: replicas of each role are created and deleted as a controller wants.

Collector windows, the policy engine's core for scaled services, the pre-scheduler's plan, the actuator's core and the
gateway's router are those of production. A run begins when the first replicas serve; the trace starts then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from actuator.core.model import Limits, PlacedSpec
from actuator.core.world import Node
from lab.virtual.actuation import ActuatorPace
from lab.virtual.gateway import CLUSTER
from lab.virtual.network import Place
from lab.virtual.observing import VirtualCollector
from lab.virtual.placing import PlacingActuator, PreScheduler
from lab.virtual.result import RunResult, TimelinePoint
from lab.virtual.scaled_control import ScaledController, ScaledLook
from lab.virtual.servers import VirtualServers
from lab.virtual.serving import Serving
from lab.virtual.staged_gateway import StagedGateway
from policy_engine.core.scaled.scaling_request import exists, scaling_request
from policy_engine.core.shared.vocabulary import MemberKey
from simulator.core.memory import GpuId
from simulator.core.profile import Profile
from simulator.core.requests import FinishedRequest
from simulator.traces.model import TraceRequest
from trimtab.config.resources import ServicePolicy
from trimtab.domain.role_signals import FrontDoor
from trimtab.domain.scaling import ScalingRequest
from trimtab.domain.vocabulary import Role

BRING_UP_S = 3600.0
"""How long the first replicas may take to serve."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSetup:
    """A service and everything that does not depend on its controller. `first` are the replicas that it starts with."""

    policy: ServicePolicy
    nodes: tuple[Node, ...]
    profiles: Mapping[str, Profile]
    gpu_memory_gib: float
    first: Mapping[Role, int]
    window_s: float = 5.0
    scrape_s: float = 1.0
    cycle_s: float = 5.0
    """Between two cycles of the pre-scheduler over pending requests; a new request is served at once."""
    limits: Limits = dataclasses.field(default_factory=Limits)
    pace: ActuatorPace = dataclasses.field(default_factory=ActuatorPace)
    timeline_s: float = 10.0


class ScaledRun:
    """The pieces of one run, wired to each other."""

    def __init__(self, setup: ScaledSetup, controller: ScaledController) -> None:
        self.setup = setup
        self.controller = controller
        self.service = setup.policy.name
        places = {node.node: Place(s1=node.s1, s2=node.s2, cluster=CLUSTER) for node in setup.nodes}
        gpus = [GpuId(node.node, index) for node in setup.nodes for index in range(node.gpus)]
        self.gateway = StagedGateway([self.service], places, on_empty=self._kick)
        self.servers = VirtualServers(dict.fromkeys(gpus, setup.gpu_memory_gib), self._finished)
        self.gateway.connect(self.servers)
        self.collector = VirtualCollector(window_s=setup.window_s, interval_s=setup.scrape_s)
        self.serving = Serving(
            self.gateway, self.servers, self.collector, services=[self.service], timeline_s=setup.timeline_s
        )
        self.actuator = PlacingActuator(
            self.servers,
            self.gateway,
            nodes=setup.nodes,
            profiles=setup.profiles,
            limits=setup.limits,
            pace=setup.pace,
            on_created=self._created,
            on_deleted=self._deleted,
        )
        self.prescheduler = PreScheduler(self.actuator)
        self.roles: tuple[Role, ...] = tuple(spec.role for spec in setup.policy.spec.roles)
        self.timeline: list[TimelinePoint] = []
        self.energy_kwh: float | None = None
        self.busy_gpu_hours = 0.0
        self.changes = 0
        self._wanted: dict[Role, int] = dict(setup.first)
        self._decided_s = 0.0
        self._planned_s = -setup.cycle_s
        self._tally = self.serving.tallies[self.service]

    def run(self, requests: Iterable[TraceRequest], *, duration_s: float, grace_s: float) -> None:
        """Bring the first replicas up, serve a trace, and let what is left end for `grace_s`. Call once.

        Raises RuntimeError when the first replicas do not come up.
        """
        clock = self.servers.clock
        self.actuator.start()
        clock.call_at(self.setup.scrape_s, self._beat)
        while not self._all_routable():
            if clock.now_s > BRING_UP_S:
                raise RuntimeError(f"{self.service}: {self._wanted} did not come up within {BRING_UP_S:g} s")
            clock.run_before(clock.now_s + self.setup.scrape_s)
        clock.run_before(clock.now_s + 2 * self.setup.window_s)
        before_kwh, before_busy = self.servers.held_energy_kwh(), self.servers.busy_gpu_hours()
        self.serving.serve(requests, start_s=clock.now_s, duration_s=duration_s)
        after_kwh = self.servers.held_energy_kwh()
        if before_kwh is not None and after_kwh is not None:
            self.energy_kwh = after_kwh - before_kwh
        self.busy_gpu_hours = self.servers.busy_gpu_hours() - before_busy
        self.serving.let_end(grace_s)

    def result(self, *, policy: str, trace: str, seed: int, duration_s: float) -> RunResult:
        """What is left of the run."""
        columns = self.gateway.columns()
        return RunResult(
            policy=policy,
            trace=trace,
            seed=seed,
            requests=columns.since(self.serving.started_s),
            timeline=tuple(self.timeline),
            duration_s=duration_s,
            gpu_hours=self.serving.gpu_hours,
            energy_kwh=self.energy_kwh,
            transitions=self.changes,
            counts={
                "GPU utilisation": self.busy_gpu_hours / self.serving.gpu_hours if self.serving.gpu_hours else 0.0,
                "reissued": float(columns.reissued.sum()),
                "lost with a replica": float(self.actuator.lost_requests),
                "cycles denied": float(self.prescheduler.denied),
            },
        )

    def _beat(self, now_s: float) -> None:
        """One scrape, the controller's turn, and the pre-scheduler's where something is to be done."""
        self.serving.look(now_s, windows=self.controller.reads_windows, sleepers=False)
        names, routable = self._names()
        if now_s >= self.serving.started_s:
            self._decide(now_s, names, routable)
        self._plan(now_s)
        if self.serving.point_due(now_s):
            self._draw(now_s, names, routable)
        if self.serving.goes_on(now_s):
            self.servers.clock.call_at(now_s + self.setup.scrape_s, self._beat)

    def _decide(self, now_s: float, names: Mapping[Role, Sequence[str]], routable: frozenset[str]) -> None:
        keys = {MemberKey(self.service, role): [n for n in names[role] if n in routable] for role in self.roles}
        views, fronts = self.collector.signals(now_s, keys)
        look = ScaledLook(
            now_s=now_s,
            views={key.role: view for key, view in views.items()},
            front=fronts.get(self.service, FrontDoor()),
            names=names,
            routable=routable,
            samples=self.serving.samples,
            traffic=self.serving.traffic(now_s)[self.service],
        )
        wanted = dict(self.controller.tick(look))
        if wanted and wanted != self._wanted:
            self._wanted = wanted
            self._decided_s = now_s
            self._planned_s = now_s - self.setup.cycle_s
            self.changes += 1

    def _plan(self, now_s: float) -> None:
        if now_s - self._planned_s >= self.setup.cycle_s - 1e-6:
            self._planned_s = now_s
            self.prescheduler.cycle([self._request()], now_s)

    def _request(self) -> ScalingRequest:
        return scaling_request(
            self.setup.policy,
            tuple(self._wanted.items()),
            decision_id=f"d-{self.changes}",
            created_s=self._decided_s,
        )

    def _names(self) -> tuple[dict[Role, list[str]], frozenset[str]]:
        """Replicas by role that are not on their way out, and those that are routable."""
        found: dict[Role, list[str]] = {role: [] for role in self.roles}
        routable = set()
        for name, record in sorted(self.actuator.state.replicas.items()):
            if exists(record.life_cycle):
                found[record.spec.role].append(name)
            if record.routable:
                routable.add(name)
        return found, frozenset(routable)

    def _all_routable(self) -> bool:
        names, routable = self._names()
        return all(
            sum(1 for name in names[role] if name in routable) >= count for role, count in self.setup.first.items()
        )

    def _draw(self, now_s: float, names: Mapping[Role, Sequence[str]], routable: frozenset[str]) -> None:
        for role in self.roles:
            samples = [self.serving.samples[name] for name in names[role] if name in self.serving.samples]
            held = self.gateway.held(self.service) if role is not Role.DECODE else 0
            self.timeline.append(
                TimelinePoint(
                    at_s=now_s - self.serving.started_s,
                    service=self.service,
                    role=role.value,
                    desired=self._wanted.get(role, 0),
                    routable=sum(1 for name in names[role] if name in routable),
                    running=float(sum(sample.running for sample in samples)),
                    waiting=float(sum(sample.waiting for sample in samples) + held),
                )
            )

    def _created(self, placed: PlacedSpec) -> None:
        self.collector.add(placed.replica, placed.service, placed.role, len(placed.placement.gpu_indices))

    def _deleted(self, name: str) -> None:
        self.collector.remove(name)
        self.serving.forget(name)

    def _kick(self) -> None:
        self.actuator.kick()

    def _finished(self, index: int, finished: FinishedRequest) -> None:
        server = self.servers.by_index[index]
        server.recorder.finished(finished)
        if finished.request.hold_kv:
            self._tally.prefilled(finished)
        elif server.role is Role.DECODE:
            self._tally.decoded(finished)
        else:
            self._tally.ended(finished)
        if self.gateway.finished(finished):
            self.actuator.kick()


def run_scaled(
    setup: ScaledSetup,
    requests: Iterable[TraceRequest],
    controller: ScaledController,
    *,
    policy: str,
    trace: str,
    seed: int,
    duration_s: float,
    grace_s: float = 600.0,
) -> RunResult:
    """One run; what is not answered `grace_s` after the trace's end stays unanswered."""
    run = ScaledRun(setup, controller)
    run.run(requests, duration_s=duration_s, grace_s=grace_s)
    return run.result(policy=policy, trace=trace, seed=seed, duration_s=duration_s)
