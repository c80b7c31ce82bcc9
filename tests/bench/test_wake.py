"""The wake bench judges by the slowest steps and by those that brought no wake; its run is for a quiet machine."""

import pytest

from bench.wake import DRAIN_S, FAST_S, SCRAPE_S, Cell, Measured, Step, bars, percentile
from trimtab.config.resources import Pool, ServicePolicy


def measured(*called_s: float, missed: int = 0) -> Measured:
    steps = [Step(cell="c", decided_s=0.5, accepted_s=0.6, released_s=None, called_s=value) for value in called_s]
    return Measured(steps=steps, missed=["no wake"] * missed)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0, 1.0, 2.0], 0.99, 3.0), ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0), ([5.0], 0.0, 5.0), (list(range(200)), 0.99, 197)],
)
def test_a_percentile_is_a_value_that_was_seen(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_one_slow_step_in_thirty_and_one_that_brought_no_wake_miss_the_bar() -> None:
    idle_s = SCRAPE_S + FAST_S + 0.1
    donor_s = idle_s + DRAIN_S + 1.87
    good = {"idle": measured(*[1.0] * 29, idle_s), "donor": measured(*[3.0] * 29, donor_s)}
    assert [(bar["name"], bar["bar"], bar["ok"]) for bar in bars(good)] == [
        ("wake_idle_p99_s", round(idle_s, 3), True),
        ("wake_donor_p99_s", round(donor_s, 3), True),
    ]
    slow = {"idle": measured(*[1.0] * 29, idle_s + 0.01), "donor": measured(*[3.0] * 29, missed=1)}
    assert [(bar["value"], bar["ok"]) for bar in bars(slow)] == [(idle_s + 0.01, False), (None, False)]
    assert [bar["ok"] for bar in bars({"idle": measured(), "donor": measured()})] == [False, False]


@pytest.mark.parametrize("kind", ["idle", "donor"])
def test_the_pools_of_a_cell_are_valid_resources_that_leave_a_gpu_to_be_had(kind: str) -> None:
    cell = Cell(kind, 0)
    pool = cell.pool()
    assert isinstance(pool, Pool)
    awake = sum(member.initial_awake for member in pool.spec.members)
    assert pool.spec.budget_gpus - awake == (1 if kind == "idle" else 0)
    for armed in (False, True):
        floors = [one.spec.roles[0] for one in cell.resources(armed=armed) if isinstance(one, ServicePolicy)]
        assert sum(role.min_replicas for role in floors) <= pool.spec.budget_gpus
        assert floors[0].max_replicas == (2 if armed else 1)
