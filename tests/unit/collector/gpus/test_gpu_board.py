"""GPUs over time, and what of them each replica has."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics_collector.core.gpu_table import MAX_READINGS, GpuAverages, GpuClaim, GpuTable, GpuWindow
from trimtab.domain.dialects.dcgm import GpuReading, GpuValues

ABSENT = math.nan


def reading(**gpus: tuple[float, float, float, float]) -> GpuReading:
    """``reading(g0=(utilisation, SM activity, watts, memory))``"""
    return GpuReading({int(name[1:]): GpuValues(*values) for name, values in gpus.items()})


def test_a_value_is_averaged_over_time_not_over_readings() -> None:
    board = GpuTable(keep_s=60)
    # 100 W at 1 s, 300 W at 2 s and until 5 s: (1 s · 200 W + 3 s · 300 W) / 4 s.
    for at_s, watts in ((1.0, 100.0), (2.0, 300.0), (5.0, 300.0)):
        board.put("gpu-a", reading(g0=(0.5, 0.25, watts, 0.1)), at_s=at_s)

    averages = board.window(0.0, 5.0).gpus["gpu-a", 0]

    assert averages == GpuAverages(0.5, 0.25, 275.0, pytest.approx(0.1))


def test_a_window_is_half_open_and_one_reading_stands_for_itself() -> None:
    board = GpuTable(keep_s=60)
    for at_s, watts in ((5.0, 100.0), (10.0, 200.0), (15.0, 400.0)):
        board.put("gpu-a", reading(g0=(0.0, 0.0, watts, 0.0)), at_s=at_s)

    assert board.window(5.0, 10.0).gpus["gpu-a", 0].power_w == 200.0
    assert board.window(0.0, 4.9).gpus == {}


def test_a_reading_that_lacks_a_value_is_left_out_of_its_average_alone() -> None:
    board = GpuTable(keep_s=60)
    board.put("gpu-a", reading(g0=(0.2, ABSENT, 100.0, 0.1)), at_s=1.0)
    board.put("gpu-a", reading(g0=(ABSENT, ABSENT, 200.0, 0.1)), at_s=2.0)
    board.put("gpu-a", reading(g0=(0.4, ABSENT, 300.0, 0.1)), at_s=3.0)

    averages = board.window(0.0, 3.0).gpus["gpu-a", 0]

    assert averages.utilisation_ratio == pytest.approx(0.3)
    assert averages.sm_activity_ratio is None
    assert averages.power_w == 200.0


NODE = GpuWindow(
    {
        ("gpu-a", 0): GpuAverages(0.8, 0.4, 300.0, 0.9),
        ("gpu-a", 1): GpuAverages(0.6, 0.2, 200.0, 0.7),
        ("gpu-a", 2): GpuAverages(0.1, None, 100.0, 0.5),
        ("gpu-b", 0): GpuAverages(0.0, 0.0, 60.0, 0.0),
    }
)


@pytest.mark.parametrize(
    ("node", "indices", "expected"),
    [
        pytest.param("gpu-a", (0,), (0.8, 0.4, 300.0, 0.9), id="one GPU"),
        pytest.param("gpu-a", (0, 1), (0.7, 0.3, 500.0, 0.8), id="means, and power in sum"),
        pytest.param("gpu-a", (0, 2), (0.45, None, 400.0, 0.7), id="one without SM activity: none, not half of it"),
        pytest.param("gpu-a", (0, 3), (None, None, None, None), id="one of two unknown: nothing"),
        pytest.param("gpu-b", (0,), (0.0, 0.0, 60.0, 0.0), id="idle is zero, not missing"),
        pytest.param("gpu-c", (0,), (None, None, None, None), id="a node without an exporter"),
        pytest.param("gpu-a", (), (None, None, None, None), id="a replica without GPUs"),
    ],
)
def test_a_replica_has_the_values_of_all_its_gpus_or_none(
    node: str, indices: tuple[int, ...], expected: tuple[float | None, ...]
) -> None:
    assert NODE.for_replica(node, indices) == tuple(
        None if value is None else pytest.approx(value) for value in expected
    )


def claim(replica: str, *indices: int, counts: bool = True) -> GpuClaim:
    return GpuClaim(replica=replica, node="gpu-a", gpu_indices=indices, counts=counts)


def test_the_awake_replica_of_a_gpu_has_its_power_and_the_sleeping_one_has_nothing() -> None:
    found = NODE.for_replicas([claim("chat-0", 0), claim("code-0", 0, counts=False), claim("code-1", 1)])

    assert sorted(found) == ["chat-0", "code-1"]
    assert found["chat-0"].power_w == 300.0
    assert found["code-1"].power_w == 200.0


def test_two_awake_replicas_of_one_gpu_share_its_power_and_both_show_its_load() -> None:
    found = NODE.for_replicas([claim("chat-0", 0), claim("big-0", 0, 1)])

    assert found["chat-0"].power_w == 150.0
    assert found["big-0"].power_w == 350.0
    assert found["chat-0"].utilisation_ratio == 0.8
    assert found["big-0"].utilisation_ratio == pytest.approx(0.7)


def test_a_node_keeps_what_the_window_needs_and_no_more() -> None:
    board = GpuTable(keep_s=5)
    for second in range(1, 2 * MAX_READINGS):
        assert board.put("gpu-a", reading(g0=(0.0, 0.0, float(second), 0.0)), at_s=float(second))

    kept = board.window(0.0, 1e9).gpus["gpu-a", 0]
    last = 2 * MAX_READINGS - 1

    assert kept.power_w == pytest.approx(last - 2.5), "the last 5 s alone"
    assert not board.put("gpu-a", reading(g0=(0.0, 0.0, 1.0, 0.0)), at_s=float(last)), "not newer than the last"


def test_a_clock_that_was_set_back_is_followed() -> None:
    board = GpuTable(keep_s=5)
    board.put("gpu-a", reading(g0=(0.0, 0.0, 100.0, 0.0)), at_s=1000.0)

    assert board.put("gpu-a", reading(g0=(0.0, 0.0, 200.0, 0.0)), at_s=10.0)
    assert board.window(5.0, 2000.0).gpus["gpu-a", 0].power_w == 200.0


def test_a_node_that_leaves_takes_its_gpus_along() -> None:
    board = GpuTable(keep_s=5)
    board.put("gpu-a", reading(g0=(0.1, 0.1, 100.0, 0.1)), at_s=1.0)
    board.put("gpu-b", reading(g0=(0.1, 0.1, 100.0, 0.1)), at_s=1.0)
    board.remove("gpu-a")
    board.remove("gpu-z")

    assert list(board.window(0.0, 1.0).gpus) == [("gpu-b", 0)]
    assert board.nodes == 1


WATTS = st.floats(0, 1000) | st.just(ABSENT)


@given(st.lists(st.tuples(st.floats(0.001, 10), WATTS), min_size=1, max_size=20))
def test_an_average_lies_between_its_readings_and_is_never_nan(steps: list[tuple[float, float]]) -> None:
    board = GpuTable(keep_s=1000)
    at_s = 0.0
    for step_s, watts in steps:
        at_s += step_s
        board.put("gpu-a", reading(g0=(ABSENT, ABSENT, watts, ABSENT)), at_s=at_s)

    power_w = board.window(0.0, at_s).gpus["gpu-a", 0].power_w
    known = [watts for _, watts in steps if not math.isnan(watts)]

    if known:
        assert power_w is not None
        assert min(known) - 1e-6 <= power_w <= max(known) + 1e-6
    else:
        assert power_w is None


@given(
    st.dictionaries(st.integers(0, 3), st.floats(0, 1000), min_size=4, max_size=4),
    st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.booleans()), min_size=1, max_size=6),
)
def test_power_given_to_replicas_adds_up_to_what_the_used_cards_draw(
    watts: Mapping[int, float], replicas: list[tuple[set[int], bool]]
) -> None:
    window = GpuWindow({("gpu-a", index): GpuAverages(0.5, 0.5, value, 0.5) for index, value in watts.items()})
    claims = [
        claim(f"r-{number}", *sorted(indices), counts=counts) for number, (indices, counts) in enumerate(replicas)
    ]
    used = {index for indices, counts in replicas if counts for index in indices}

    given_w = sum(averages.power_w or 0.0 for averages in window.for_replicas(claims).values())

    assert given_w == pytest.approx(sum(watts[index] for index in used), abs=1e-6)
