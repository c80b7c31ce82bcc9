"""Pools on virtual time that lost sleepers: made again where GPUs are free, pre-warmed where others serve on them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from actuator.core.model import Operation, OperationKind, OperationState
from lab.baselines.interface import Desired, FleetView
from lab.virtual.control import ShareController
from lab.virtual.counts import CountController
from lab.virtual.pool_run import START_S, PoolRun, PoolSetup
from tests.unit.lab.virtual.pools import MODELS, pool_setup, stepped_trace
from trimtab.domain.vocabulary import LifeCycle

DURATION_S = 240.0
LOST = "large-a-2"
"""One of the two replicas that `large` may have beside the first; two `small` serve on its GPUs."""


def lost(setup: PoolSetup, *names: str) -> PoolSetup:
    return dataclasses.replace(setup, lost_sleepers=frozenset(names))


def keep(view: FleetView) -> Desired:
    return {role.key: role.desired for role in view.roles}


def ended(run: PoolRun, kind: OperationKind) -> list[Operation]:
    return [operation for operation in run.actuator.operations_ended if operation.kind is kind]


def served(*, prewarm: bool) -> tuple[PoolRun, np.ndarray]:
    """A run in which `large` needs twice its replicas from half time on; the latencies of its requests from then."""
    run = PoolRun(lost(pool_setup(prewarm=prewarm), LOST, "large-a-4"), ShareController())
    trace = stepped_trace(seed=1, duration_s=DURATION_S, small_rps=6.0, large_rps=(1.0, 15.0))
    run.run(trace, duration_s=DURATION_S, grace_s=600.0)
    requests = run.result(policy="p", trace="t", seed=1, duration_s=DURATION_S).requests
    assert bool(requests.complete.all())
    late = (requests.service == requests.services.index("large")) & (requests.arrival_s >= DURATION_S / 2)
    return run, requests.e2e_s[late]


def test_a_cold_replica_is_warmed_up_ahead_of_need_and_woken_in_seconds_when_it_is_needed() -> None:
    cold, e2e_cold_s = served(prewarm=False)
    warm, e2e_warm_s = served(prewarm=True)
    assert not ended(cold, OperationKind.PREWARM)
    first, *_ = ended(warm, OperationKind.PREWARM)
    assert (first.state, LOST in first.detail) == (OperationState.SUCCEEDED, True)
    assert first.update_s < START_S + DURATION_S / 2
    times = warm.setup.profiles[MODELS["large"][0]].lifecycle
    assert first.update_s - first.create_s > times.start_up_s + times.first_sleep_s
    (rescue,) = ended(warm, OperationKind.TRANSITION)
    assert rescue.state is OperationState.SUCCEEDED
    assert {step.replica for step in rescue.steps} & {LOST, "large-a-4"}
    assert rescue.update_s - rescue.create_s < times.start_up_s / 3
    assert np.percentile(e2e_warm_s, 95) < 0.6 * np.percentile(e2e_cold_s, 95)


def test_equal_runs_with_pre_warming_are_equal_bit_for_bit() -> None:
    first, second = (served(prewarm=True)[1] for _ in range(2))
    assert first.tobytes() == second.tobytes()


def test_a_lost_sleeper_whose_gpu_nobody_uses_is_made_again_without_pre_warming() -> None:
    run = PoolRun(lost(pool_setup(awake={"small": 2, "large": 1}), "small-a-4"), CountController(keep, period_s=5.0))
    run.run([], duration_s=90.0, grace_s=0.0)
    (made,) = ended(run, OperationKind.OVERLAY)
    assert (made.state, made.detail) == (OperationState.SUCCEEDED, "created small-a-4")
    record = run.actuator.state.replicas["small-a-4"]
    assert (record.life_cycle, record.slept_once) == (LifeCycle.SLEEPING, True)
    assert run.actuator.lost_requests == 0


def test_a_pre_warming_gives_way_to_a_newer_state_and_what_boots_is_deleted() -> None:
    """The donors' role is to shrink while the cold one boots."""

    def shrink(view: FleetView) -> Desired:
        late = view.now_s >= START_S + 20.0
        return {role.key: 3 if late and role.key.service == "small" else role.desired for role in view.roles}

    run = PoolRun(lost(pool_setup(prewarm=True), LOST), CountController(shrink, period_s=5.0))
    trace = stepped_trace(seed=1, duration_s=60.0, small_rps=2.0, large_rps=(1.0, 1.0))
    booting: list[bool] = []
    run.servers.clock.call_at(START_S + 19.0, lambda _: booting.append(LOST in run.servers.by_name))
    run.run(trace, duration_s=60.0, grace_s=60.0)
    assert booting == [True]
    first, *_ = ended(run, OperationKind.PREWARM)
    assert (first.state, first.detail) == (OperationState.CANCELLED, "gave way to state revision 2")
    assert run.actuator.lost_requests == 0
    assert bool(run.result(policy="p", trace="t", seed=1, duration_s=60.0).requests.complete.all())
    awake = [record.name for record in run.actuator.state.replicas.values() if record.life_cycle is LifeCycle.ACTIVE]
    assert tuple(sorted(awake)) == run.desk.awake
    assert sum(name.startswith("small") for name in awake) == 3


@pytest.mark.parametrize("name", ["large-a-0", "stranger"])
def test_only_a_sleeper_of_the_pool_can_be_lost(name: str) -> None:
    with pytest.raises(ValueError, match=f"lost_sleepers .*{name}.*asleep"):
        PoolRun(lost(pool_setup(), name), ShareController())
