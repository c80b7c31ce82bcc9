"""When rounds end. When targets are due is tested with the targets."""

import pytest

from metrics_collector.core.schedule import next_round


@pytest.mark.parametrize(
    ("last", "now_s", "expected"),
    [(0, 10.3, 6), (6, 12.0, 7), (6, 12.1, 7), (6, 13.9, 7), (6, 19.0, 9), (6, 4.5, 3)],
    ids=["first", "on time", "a little late", "nearly too late", "rounds lost", "the clock was set back"],
)
def test_rounds_are_aligned_and_none_is_waited_for(last: int, now_s: float, expected: int) -> None:
    assert next_round(last, now_s, interval_s=2.0) == expected
