"""Scaled services on virtual time: replicas come and go by the cores of production, and every request is answered."""

import dataclasses

import numpy as np
import pytest

from actuator.core.model import Limits
from lab.baselines.catalogue import BASELINES
from lab.baselines.interface import Desired, FleetView, RoleKey
from lab.virtual.gpu_outputs import GPU_POWER
from lab.virtual.result import RunResult
from lab.virtual.scaled_control import ProportionalController, ScaledCounts
from lab.virtual.scaled_run import ScaledRun, ScaledSetup
from simulator.profiles import packaged_profiles
from tests.unit.lab.virtual.services import NAME, PROFILE, policy, ramp, setup
from trimtab.domain.vocabulary import Role


def proportional(given: ScaledSetup, *, seed: int = 1) -> tuple[ScaledRun, RunResult]:
    run = ScaledRun(given, ProportionalController(given.policy))
    run.run(ramp(seed=seed), duration_s=300.0, grace_s=120.0)
    return run, run.result(policy="trimtab", trace="ramp", seed=seed, duration_s=300.0)


@pytest.fixture(scope="module")
def base() -> tuple[ScaledRun, RunResult]:
    return proportional(setup())


def desired(result: RunResult, role: Role) -> list[int]:
    return [point.desired for point in result.timeline if point.role == role.value]


def test_a_service_grows_with_its_load_and_shrinks_after_it_and_loses_nothing(
    base: tuple[ScaledRun, RunResult],
) -> None:
    trace = ramp()
    run, result = base
    rows = result.requests
    assert len(rows) == len(trace)
    assert rows.complete.all()
    assert not rows.lost.any()
    assert (rows.first_token_s > rows.arrival_s).all()
    assert (rows.finished_s >= rows.first_token_s).all()
    assert rows.output_tokens.tolist() == [one.output_tokens for one in trace]
    decode = desired(result, Role.DECODE)
    assert max(decode) >= 3
    assert decode[-1] == 1
    assert decode == desired(result, Role.PREFILL), "the ratio is one to one"
    assert max(point.routable for point in result.timeline) >= 3
    assert sorted(record.spec.role for record in run.actuator.state.replicas.values()) == [Role.DECODE, Role.PREFILL]
    assert sorted(run.servers.by_name) == sorted(run.actuator.state.replicas), "who left gave its GPUs back"
    assert 2 * 300 / 3600 < result.gpu_hours < 8 * 300 / 3600


def later(counts: dict[Role, int], *, at_s: float) -> ScaledCounts:
    """One unit, and `counts` from `at_s` on the run's clock."""
    key = {role: RoleKey(NAME, role) for role in counts}

    def tick(view: FleetView) -> Desired:
        return {key[role]: counts[role] if view.now_s >= at_s else 1 for role in counts}

    return ScaledCounts(policy(), tick, ((Role.PREFILL, 1), (Role.DECODE, 1)))


def test_a_gpu_idles_from_the_start_of_its_server_on_and_not_once_it_is_given_back() -> None:
    """Without requests all energy is idle power, also of the replica that is still starting when the run ends."""
    given = setup()
    start_up_s = given.profiles[PROFILE].lifecycle.start_up_s
    for counts, held_gpus in (({Role.PREFILL: 1, Role.DECODE: 3}, 4), ({Role.PREFILL: 1, Role.DECODE: 1}, 2)):
        run = ScaledRun(given, later(counts, at_s=0.0))
        run.run([], duration_s=start_up_s / 2, grace_s=0.0)
        result = run.result(policy="p", trace="t", seed=1, duration_s=start_up_s / 2)
        hours = held_gpus * start_up_s / 2 / 3600
        assert result.gpu_hours == pytest.approx(hours, rel=0.05)
        assert result.energy_kwh == pytest.approx(result.gpu_hours * GPU_POWER["H100"].idle_w / 1000)
        assert result.counts["GPU utilisation"] == 0.0


def test_arithmetic_costs_what_its_tokens_take_whoever_has_left(base: tuple[ScaledRun, RunResult]) -> None:
    """Beyond idle power: every prompt once on a prefill replica, and every token of an answer on a decode replica."""
    run, result = base
    trace, power = ramp(), GPU_POWER["H100"]
    tokens = sum(one.prompt_tokens + one.output_tokens for one in trace)
    token_s = next(iter(run.setup.profiles.values())).iteration_model().token_s
    expected_kwh = tokens * token_s * (power.peak_w - power.idle_w) / 3.6e6
    assert result.energy_kwh is not None
    assert len(run.servers.by_index) > len(run.servers.by_name)
    assert 0.2 < result.counts["GPU utilisation"] < 0.95
    assert result.energy_kwh - result.gpu_hours * power.idle_w / 1000 == pytest.approx(expected_kwh, rel=0.01)


def test_the_energy_of_gpus_of_unknown_power_is_not_told() -> None:
    unknown = packaged_profiles()[PROFILE].model_copy(update={"gpu_type": "abacus"})
    given = setup(profiles={PROFILE: unknown})
    _, result = proportional(given)
    assert result.energy_kwh is None
    assert result.gpu_hours > 0


def test_placements_are_the_pre_schedulers_no_gpu_is_given_twice(base: tuple[ScaledRun, RunResult]) -> None:
    run, _ = base
    held: dict[tuple[str, int], str] = {}
    for operation in run.actuator.state.operations.values():
        for step in operation.steps:
            if step.placed is not None:
                assert step.placed.spec.group.startswith("assist")
                assert all(index < 4 for index in step.placed.placement.gpu_indices)
    for name, record in run.actuator.state.replicas.items():
        for gpu in record.gpus:
            assert held.setdefault(gpu, name) == name


def test_equal_arguments_give_equal_runs_and_other_seeds_others(base: tuple[ScaledRun, RunResult]) -> None:
    (_, one), (_, same), (_, other) = base, proportional(setup()), proportional(setup(), seed=2)
    assert one.timeline == same.timeline
    assert np.array_equal(one.requests.finished_s, same.requests.finished_s)
    assert len(one.requests) != len(other.requests)


def test_a_full_cluster_denies_and_the_service_stays_whole() -> None:
    run, result = proportional(setup(nodes=1, gpus=3))
    assert run.prescheduler.denied > 0
    assert max(desired(result, Role.DECODE)) > 1
    routable = {point.role: point.routable for point in result.timeline}
    assert routable == {"decode": 1, "prefill": 1}, "a unit needs two GPUs and one is left"
    assert result.requests.complete.all()


def test_a_short_drain_moves_requests_and_still_answers_them() -> None:
    hasty = dataclasses.replace(setup(), limits=Limits(default_drain_s=0.1))
    run, result = proportional(hasty)
    assert result.requests.reissued.sum() > 0
    assert result.requests.complete.all()
    assert run.actuator.lost_requests == 0


def test_what_a_replica_takes_with_it_is_lost_and_counted() -> None:
    given = setup(most=1)
    run = ScaledRun(given, ProportionalController(given.policy))
    lost: list[int] = []

    def cut(at_s: float) -> None:
        (decode,) = [name for name, server in run.servers.by_name.items() if server.role is Role.DECODE]
        lost.append(run.gateway.cut_off(decode, at_s))

    run.servers.clock.call_at(100.0, cut)
    run.run(ramp(top_rps=8.0), duration_s=300.0, grace_s=120.0)
    rows = run.result(policy="trimtab", trace="ramp", seed=1, duration_s=300.0).requests
    assert lost[0] > 0
    assert int(rows.lost.sum()) == lost[0] == int((~rows.complete).sum())


def test_the_first_token_waits_for_the_kv_and_longer_across_switches() -> None:
    """One node has room for both roles, or each role has to go to a node of its own."""
    transfers = []
    for nodes, gpus in ((1, 2), (2, 1)):
        given = setup(nodes=nodes, gpus=gpus, most=1)
        run, result = proportional(given)
        assert run.gateway.transferred_tokens == sum(one.prompt_tokens for one in ramp())
        transfers.append(float(np.median(result.requests.ttft_s)))
    profile = next(iter(setup().profiles.values()))
    assert transfers[1] > transfers[0]
    assert transfers[0] > profile.kv_link().transfer_s(800)


def test_a_baseline_answers_with_counts_of_each_role() -> None:
    given = setup()
    tick = BASELINES["hpa-running"].started({"target": 4.0, "down_window_s": 0.0, "period_s": 5.0})
    controller = ScaledCounts(given.policy, tick, tuple(given.first.items()))
    run = ScaledRun(given, controller)
    run.run(ramp(), duration_s=300.0, grace_s=120.0)
    result = run.result(policy="hpa", trace="ramp", seed=1, duration_s=300.0)
    assert result.requests.complete.all()
    assert max(desired(result, Role.DECODE)) > 1
    assert desired(result, Role.DECODE) != desired(result, Role.PREFILL), "each role by itself"


def test_replicas_that_never_come_up_end_the_run_with_a_word() -> None:
    given = setup(nodes=1, gpus=1)
    with pytest.raises(RuntimeError, match="did not come up within"):
        ScaledRun(given, ProportionalController(policy())).run(ramp(), duration_s=300.0, grace_s=1.0)
