"""Quantiles are Prometheus's, and histograms add up exactly on the bounds that they share."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.domain.histogram import EMPTY, Histogram, merge_histograms

INF = math.inf


def of(*increases: int, bounds: tuple[float, ...], total: float = 0.0) -> Histogram:
    cumulative = [sum(increases[: place + 1]) for place in range(len(increases))]
    return Histogram(upper_bounds=bounds, cumulative=cumulative, total=total)


# What Prometheus 2.42 answers for the same buckets.
@pytest.mark.parametrize(
    ("quantile", "bounds", "cumulative", "value", "overflow"),
    [
        (0.5, (0.1, 0.2, INF), (2, 4, 4), 0.1, False),
        (0.95, (0.1, 0.2, INF), (2, 4, 4), 0.19, False),
        (0.0, (0.1, 0.2, INF), (2, 4, 4), 0.0, False),
        (1.0, (0.1, 0.2, INF), (2, 4, 4), 0.2, False),
        (0.25, (1.0, 2.0, INF), (4, 4, 4), 0.25, False),
        (0.5, (1.0, 2.0, INF), (0, 0, 4), 2.0, True),
        (0.9, (1.0, 2.0, INF), (1, 2, 10), 2.0, True),
        (0.5, (-1.0, 1.0, INF), (3, 4, 4), -1.0, False),
        (0.0, (1.0, 2.0, INF), (0, 4, 4), 1.0, False),
    ],
)
def test_quantiles_are_prometheus(
    quantile: float, bounds: tuple[float, ...], cumulative: tuple[float, ...], value: float, overflow: bool
) -> None:
    found = Histogram(upper_bounds=bounds, cumulative=cumulative, total=0.0).quantile(quantile)
    assert found is not None
    assert found[0] == pytest.approx(value)
    assert found[1] is overflow


@pytest.mark.parametrize(("bounds", "cumulative"), [((INF,), (5,)), ((1.0, INF), (0, 0)), ((), ()), ((1.0, INF), (1,))])
def test_no_quantile_without_samples_or_finite_bounds(bounds: tuple[float, ...], cumulative: tuple[float, ...]) -> None:
    assert Histogram(upper_bounds=bounds, cumulative=cumulative, total=0.0).quantile(0.5) is None


def test_a_quantile_is_between_0_and_1() -> None:
    with pytest.raises(ValueError, match="quantile"):
        Histogram(upper_bounds=(1.0, INF), cumulative=(1, 1), total=0.0).quantile(95)


def test_histograms_add_on_the_bounds_that_all_have() -> None:
    merged = merge_histograms(
        [of(1, 2, 3, 4, bounds=(0.1, 0.5, 1.0, INF), total=7.0), of(5, 6, 7, bounds=(0.5, 2.0, INF), total=9.0)]
    )
    assert merged.upper_bounds == (0.5, INF)
    assert list(merged.cumulative) == [8, 28]
    assert (merged.count, merged.total) == (28, 16.0)


def test_nothing_is_empty() -> None:
    assert merge_histograms([]) is EMPTY
    assert EMPTY.count == 0
    assert EMPTY.quantile(0.5) is None


increases = st.lists(st.integers(0, 50), min_size=4, max_size=4)


@given(st.lists(increases, min_size=1, max_size=5), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_merging_equal_bounds_is_adding_buckets(several: list[list[int]], share: float) -> None:
    bounds = (0.1, 0.5, 1.0, INF)
    added = of(*(sum(column) for column in zip(*several, strict=True)), bounds=bounds)
    merged = merge_histograms([of(*own, bounds=bounds) for own in several])
    assert list(merged.cumulative) == list(added.cumulative)
    assert merged.quantile(share) == added.quantile(share)
