"""A pool on virtual time: nothing is lost, equal runs are equal, capacity follows demand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from actuator.core.fencing import refuse
from actuator.core.model import Limits, OperationKind, OperationState, StepKind
from lab.baselines.interface import Desired, FleetView
from lab.virtual.actuation import ActuatorPace
from lab.virtual.control import PoolDesk, PoolLook, ShareController
from lab.virtual.counts import CountController
from lab.virtual.fixed.colocated import colocated
from lab.virtual.gpu_outputs import GPU_POWER
from lab.virtual.pool_run import START_S, PoolRun, PoolSetup, WindowPace, run_pool
from lab.virtual.result import RunResult
from lab.virtual.servers import ServerState
from policy_engine.core.shared.vocabulary import MemberKey
from simulator.core.memory import OutOfMemory
from simulator.profiles import packaged_profiles
from simulator.traces.model import TraceRequest
from tests.unit.lab.virtual.pools import MODELS, pool_setup, stepped_trace
from trimtab.domain.operation import Operation
from trimtab.domain.pool import DesiredPool
from trimtab.domain.vocabulary import LifeCycle, Role

DURATION_S = 120.0


def keep(view: FleetView) -> Desired:
    """As many replicas as there are."""
    return {role.key: role.desired for role in view.roles}


def run(
    setup: PoolSetup, controller: CountController | ShareController, *, seed: int = 1, load: float = 1.0
) -> RunResult:
    trace = stepped_trace(seed=seed, duration_s=DURATION_S, small_rps=6.0 * load, large_rps=(1.0 * load, 30.0 * load))
    return run_pool(setup, trace, controller, policy="p", trace="stepped", seed=seed, duration_s=DURATION_S)


def test_every_request_is_answered_in_full_also_over_transitions() -> None:
    """Tokens in are tokens out: a reissued request counts once, with its first token where it was first given."""
    trace = stepped_trace(seed=3, duration_s=DURATION_S, small_rps=6.0, large_rps=(1.0, 30.0))
    result = run_pool(
        pool_setup(), trace, ShareController(), policy="p", trace="stepped", seed=3, duration_s=DURATION_S
    )
    columns = result.requests
    assert result.transitions >= 1
    assert len(columns) == len(trace)
    assert bool(columns.complete.all())
    assert columns.output_tokens.tolist() == [request.output_tokens for request in trace]
    assert columns.arrival_s.tolist() == [request.arrival_s for request in trace]
    assert bool((columns.first_token_s > columns.arrival_s).all())
    assert bool((columns.finished_s >= columns.first_token_s).all())
    assert int(columns.reissued.max()) <= 1


def test_tokens_that_engines_generated_are_those_that_clients_got_and_no_more() -> None:
    """Continuing an evicted request computes its prompt again, never an answer's token twice."""
    trace = stepped_trace(seed=5, duration_s=DURATION_S, small_rps=6.0, large_rps=(1.0, 30.0))
    pool = PoolRun(pool_setup(drain_timeout_s=0.2), ShareController())
    pool.run(trace, duration_s=DURATION_S, grace_s=600.0)
    generated = sum(
        pool.servers.clock.engines[server.index].observe(pool.servers.clock.now_s).generated_tokens
        for server in pool.servers.by_index
    )
    assert int(pool.gateway.columns().reissued.sum()) > 0
    assert generated == sum(request.output_tokens for request in trace)


def test_equal_runs_are_equal_bit_for_bit() -> None:
    first, second = (run(pool_setup(), ShareController()) for _ in range(2))
    assert first.requests.finished_s.tobytes() == second.requests.finished_s.tobytes()
    assert first.timeline == second.timeline
    assert (first.gpu_hours, first.energy_kwh) == (second.gpu_hours, second.energy_kwh)


def test_replicas_that_stay_serve_as_fleets_of_their_own() -> None:
    """Without a transition a pool is nothing but its services' fleets, with the same router."""
    result = run(pool_setup(), CountController(keep, period_s=5.0))
    trace = stepped_trace(seed=1, duration_s=DURATION_S, small_rps=6.0, large_rps=(1.0, 30.0))
    for position, (service, count) in enumerate((("large", 1), ("small", 4))):
        fleet = colocated(packaged_profiles()[MODELS[service][0]], count)
        records = fleet.run(request for request in trace if request.service == service)
        mine = result.requests.service == position
        expected = np.sort(records.e2e_s)
        assert np.sort(result.requests.e2e_s[mine]) == pytest.approx(expected, rel=1e-9)
    assert (result.wakes, result.releases, result.transitions) == (0, 0, 0)
    assert result.gpu_hours == pytest.approx(6 * DURATION_S / 3600)


def test_every_gpu_of_a_pool_idles_whoever_sleeps_and_arithmetic_costs_what_its_tokens_take() -> None:
    setup, power = pool_setup(awake={"small": 2, "large": 1}), GPU_POWER["A100"]
    trace = stepped_trace(seed=1, duration_s=20.0, small_rps=3.0, large_rps=(1.0, 1.0))
    tokens: dict[str, int] = dict.fromkeys(MODELS, 0)
    for request in trace:
        tokens[request.service] += request.prompt_tokens + request.output_tokens
    arithmetic_j = sum(
        tokens[name] * gpus * setup.profiles[profile].iteration_model().token_s * (power.peak_w - power.idle_w)
        for name, (profile, gpus) in MODELS.items()
    )
    for requests, joules in (([], 0.0), (trace, arithmetic_j)):
        controller = CountController(keep, period_s=5.0)
        result = run_pool(setup, requests, controller, policy="p", trace="t", seed=1, duration_s=40.0)
        idle_j = 6 * power.idle_w * 40.0
        assert result.gpu_hours == pytest.approx(4 * 40.0 / 3600)
        assert result.energy_kwh == pytest.approx((idle_j + joules) / 3.6e6, rel=0.001)


def test_the_share_rule_moves_capacity_to_who_needs_it() -> None:
    """`large` needs twice its replicas from half time on, `small` has one to spare."""
    static = run(pool_setup(), CountController(keep, period_s=5.0))
    moved = run(pool_setup(), ShareController())
    before = np.percentile(static.requests.e2e_s, 95)
    after = np.percentile(moved.requests.e2e_s, 95)
    assert moved.releases >= 2
    assert moved.wakes >= 1
    assert after < 0.8 * before
    assert any(point.z is not None for point in moved.timeline)


def test_a_gpu_never_has_two_awake_servers_and_a_floor_is_kept() -> None:
    """Looked at every 50 ms of a run that moves capacity."""
    pool = PoolRun(pool_setup(), ShareController())
    seen: list[tuple[float, int, int]] = []

    def look(now_s: float) -> None:
        users: dict[object, int] = {}
        for server in pool.servers.by_name.values():
            if server.state in (ServerState.AWAKE, ServerState.WAKING, ServerState.FALLING_ASLEEP):
                for gpu in server.gpus:
                    users[gpu] = users.get(gpu, 0) + 1
        routable = [
            sum(
                1
                for replica in pool.actuator.state.replicas.values()
                if replica.routable and replica.spec.service == service
            )
            for service in MODELS
        ]
        seen.append((now_s, max(users.values(), default=0), min(routable)))
        pool.servers.clock.call_at(now_s + 0.05, look)

    pool.servers.clock.call_at(9.0, look)
    trace = stepped_trace(seed=1, duration_s=DURATION_S, small_rps=6.0, large_rps=(1.0, 30.0))
    pool.run(trace, duration_s=DURATION_S, grace_s=60.0)
    assert pool.result(policy="p", trace="t", seed=1, duration_s=DURATION_S).transitions >= 1
    assert len(seen) > 1000
    assert max(most for _, most, _ in seen) == 1
    assert min(least for _, _, least in seen) >= 1


def test_a_wake_that_is_refused_is_rolled_back_and_the_donors_serve_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """No large server ever finds its memory free: what was released for it is woken again."""
    pool = PoolRun(pool_setup(), ShareController())
    wake = pool.servers.wake

    def refuse_large(name: str, done: Callable[[], None]) -> OutOfMemory | None:
        server = pool.servers.by_name[name]
        return OutOfMemory(server.gpus[0], 40.0, 39.0, 34.0) if server.service == "large" else wake(name, done)

    monkeypatch.setattr(pool.servers, "wake", refuse_large)
    trace = stepped_trace(seed=1, duration_s=DURATION_S, small_rps=6.0, large_rps=(1.0, 30.0))
    pool.run(trace, duration_s=DURATION_S, grace_s=600.0)
    result = pool.result(policy="p", trace="t", seed=1, duration_s=DURATION_S)
    pool.servers.clock.run_before(pool.servers.clock.now_s + 60.0)
    assert result.counts["failed transitions"] >= 1
    assert bool(result.requests.complete.all())
    awake = [record.name for record in pool.actuator.state.replicas.values() if record.life_cycle is LifeCycle.ACTIVE]
    assert tuple(sorted(awake)) == pool.desk.awake
    assert sum(1 for name in awake if pool.servers.by_name[name].service == "small") == 4


def move_one(view: FleetView) -> Desired:
    """`small` gives two replicas for one of `large`, ten seconds into the trace."""
    wanted = {"small": 2, "large": 2}
    return {role.key: wanted[role.key.service] if view.now_s >= 20.0 else role.desired for role in view.roles}


@pytest.mark.parametrize(
    ("small_rps", "limits", "said"),
    [
        pytest.param(6.0, Limits(), "", id="nothing is wrong"),
        pytest.param(60.0, Limits(), "the queue of the 3 that stay grew from 0 to", id="queue"),
        pytest.param(60.0, Limits(guard_waiting_growth=1e6), "", id="a queue that may grow"),
        pytest.param(6.0, Limits(guard_kv_usage=0.01), "of its KV cache", id="cache"),
    ],
)
def test_a_release_is_taken_back_when_those_who_stay_fill_up_and_is_asked_for_again(
    small_rps: float, limits: Limits, said: str
) -> None:
    """The actuator's guard sees the queue and the cache of the servers that serve on while a donor drains."""
    setup = dataclasses.replace(pool_setup(), limits=limits)
    pool = PoolRun(setup, CountController(move_one, period_s=5.0))
    trace = stepped_trace(seed=1, duration_s=20.0, small_rps=small_rps, large_rps=(1.0, 1.0))
    pool.run(trace, duration_s=20.0, grace_s=60.0)
    pool.servers.clock.run_before(pool.servers.clock.now_s + 60.0)
    first, *others = [one for one in pool.actuator.operations_ended if one.kind is OperationKind.TRANSITION]
    state = OperationState.ROLLED_BACK if said else OperationState.SUCCEEDED
    assert (first.state, "taken back" in first.detail) == (state, bool(said))
    assert said in first.detail
    assert others or not said
    awake = [record.name for record in pool.actuator.state.replicas.values() if record.life_cycle is LifeCycle.ACTIVE]
    assert tuple(sorted(awake)) == pool.desk.awake


def test_a_drain_ends_at_its_deadline_and_not_at_the_next_look() -> None:
    limits = Limits(guard_waiting_growth=1e6)
    setup = dataclasses.replace(pool_setup(), limits=limits, pace=ActuatorPace(look_s=10.0))
    pool = PoolRun(setup, CountController(move_one, period_s=5.0))
    late_s: list[float] = []

    def look(now_s: float) -> None:
        for operation in pool.actuator.unfinished():
            for step in operation.steps:
                record = pool.actuator.state.replicas[step.replica]
                if record.evicting and not late_s:
                    late_s.append(now_s - step.drain_deadline_s)
        pool.servers.clock.call_at(now_s + 0.02, look)

    pool.servers.clock.call_at(20.0, look)
    pool.run(
        stepped_trace(seed=1, duration_s=15.0, small_rps=60.0, large_rps=(1.0, 1.0)), duration_s=15.0, grace_s=10.0
    )
    assert late_s
    assert 0.0 <= late_s[0] <= 0.05


def test_each_action_takes_longer_by_what_its_answer_takes() -> None:
    trace = stepped_trace(seed=1, duration_s=30.0, small_rps=6.0, large_rps=(1.0, 1.0))
    took_s: dict[StepKind, list[float]] = {StepKind.RELEASE: [], StepKind.WAKE: []}
    for answer_s in (0.0, 0.5):
        setup = dataclasses.replace(pool_setup(), pace=ActuatorPace(answer_s=answer_s))
        pool = PoolRun(setup, CountController(move_one, period_s=5.0))
        pool.run(trace, duration_s=30.0, grace_s=10.0)
        steps = [step for operation in pool.actuator.operations_ended for step in operation.steps]
        for kind, found in took_s.items():
            found.append(next(step.end_s - step.start_s for step in steps if step.kind is kind))
    # A sleep; and, for a wake that waits for another's sleep, that, the wake itself and a canary token.
    assert took_s[StepKind.RELEASE][1] - took_s[StepKind.RELEASE][0] == pytest.approx(0.5, abs=0.05)
    assert took_s[StepKind.WAKE][1] - took_s[StepKind.WAKE][0] == pytest.approx(1.5, abs=0.05)


def test_a_look_at_once_spares_a_transition_the_wait_for_the_next_one() -> None:
    """Then it takes its drain, the profile's sleep and wake, and a few hundredths of a second for the calls."""
    trace = stepped_trace(seed=1, duration_s=30.0, small_rps=0.01, large_rps=(1.0, 1.0))
    took_s: dict[float | None, float] = {}
    for again_s in (0.01, None):
        pace = ActuatorPace(acknowledge_s=0.01, answer_s=0.008, again_s=again_s)
        pool = PoolRun(dataclasses.replace(pool_setup(), pace=pace), CountController(move_one, period_s=5.0))
        pool.run(trace, duration_s=30.0, grace_s=10.0)
        first = next(one for one in pool.actuator.operations_ended if one.kind is OperationKind.TRANSITION)
        took_s[again_s] = max(step.end_s for step in first.steps) - first.create_s
    times = pool.setup.profiles[MODELS["large"][0]].lifecycle
    assert times.sleep_s + times.wake_s < took_s[0.01] < times.sleep_s + times.wake_s + 0.1
    assert took_s[0.01] + 0.1 < took_s[None] < took_s[0.01] + 0.6


class Watching(ShareController):
    """Writes down when it has its turn and what it is shown of `small`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float | None, float | None, float | None]] = []

    def tick(self, look: PoolLook, desk: PoolDesk) -> None:
        view, front = look.views[MemberKey("small", Role.COLOCATED)], look.fronts["small"]
        self.seen.append((look.now_s, view.window_end_s, view.running.value, front.arrival_rps.value))


@pytest.mark.parametrize(
    ("arrives_s", "in_pages", "in_reports"),
    [(0.75, True, True), (0.85, False, True), (0.95, False, False)],
)
def test_a_turn_comes_after_a_window_whose_scrape_and_report_came_before_its_end(
    arrives_s: float, in_pages: bool, in_reports: bool
) -> None:
    """Scraped 0.2 s, reported 0.1 s before the end: what arrives later shows in the next window only."""
    pace = WindowPace(scrape_s=0.2, report_s=0.1, turn_s=0.03)
    pool = PoolRun(dataclasses.replace(pool_setup(), window_pace=pace), controller := Watching())
    pool.run([TraceRequest(arrives_s, "small", 4000, 200)], duration_s=5.0, grace_s=5.0)
    assert [at_s - end_s for at_s, end_s, *_ in controller.seen if end_s is not None] == pytest.approx(
        [0.03] * len(controller.seen)
    )
    running, arrived = next(item[2:] for item in controller.seen if item[0] >= START_S + 1.0)
    assert ((running or 0.0) > 0.0, (arrived or 0.0) > 0.0) == (in_pages, in_reports)


@pytest.mark.parametrize("times", [(0.1, 0.2, 0.0), (0.1, -0.1, 0.0), (0.1, 0.1, -0.01)])
def test_a_window_pace_that_cannot_be_is_refused(times: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="scrape_s is at least report_s"):
        WindowPace(scrape_s=times[0], report_s=times[1], turn_s=times[2])


def test_a_request_for_a_service_that_the_pool_lacks_is_refused_by_name() -> None:
    trace = stepped_trace(seed=1, duration_s=10.0, small_rps=1.0, large_rps=(1.0, 1.0))
    foreign = [type(trace[0])(1.0, "stranger", 10, 10)]
    with pytest.raises(ValueError, match="stranger"):
        run_pool(pool_setup(), foreign, ShareController(), policy="p", trace="t", seed=1, duration_s=10.0)


def test_the_first_sleep_is_slow_unless_it_was_done_before() -> None:
    """A server that never slept takes its profile's first sleep, once."""
    pool = PoolRun(pool_setup(), ShareController())
    key = MemberKey("small", Role.COLOCATED)
    name = next(name for name in pool.desk.awake if pool.desk.members[name] == key)
    server = pool.servers.by_name[name]
    times: list[float] = []
    for slept in (False, True):
        server.slept_before, server.state = slept, ServerState.AWAKE
        start_s = pool.servers.clock.now_s
        assert pool.servers.sleep(name, lambda: times.append(pool.servers.clock.now_s - start_s)) == 0  # noqa: B023
        pool.servers.clock.run_before(start_s + 60.0)
    assert times == pytest.approx([server.profile.lifecycle.first_sleep_s, server.profile.lifecycle.sleep_s])


def test_what_the_actuator_refuses_is_counted_and_asked_for_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replicas of a refused transition are left alone, the awake set stays, and other transitions follow."""
    pool = PoolRun(pool_setup(), controller := ShareController())
    apply, refused_at_s = pool.actuator.apply, list[float]()

    def refuse_once(desired: DesiredPool) -> Operation | None:
        if pool.servers.clock.now_s < START_S or refused_at_s:
            return apply(desired)
        refused_at_s.append(pool.servers.clock.now_s)
        raise refuse("GPU_TAKEN", "pool pool: for the test")

    monkeypatch.setattr(pool.actuator, "apply", refuse_once)
    trace = stepped_trace(seed=1, duration_s=DURATION_S, small_rps=6.0, large_rps=(1.0, 30.0))
    pool.run(trace, duration_s=DURATION_S, grace_s=600.0)
    result = pool.result(policy="p", trace="t", seed=1, duration_s=DURATION_S)
    assert result.counts["refused"] == 1.0
    first, second, *_ = [at_s for at_s, draft in controller.decisions if draft.transition is not None]
    assert first == refused_at_s[0]
    assert second > first
    assert result.transitions >= 1
    assert bool(result.requests.complete.all())
