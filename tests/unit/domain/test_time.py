"""Times keep their microseconds on the way to the wire and back."""

import math

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from trimtab.domain.time import microseconds_of, seconds_of, timestamp_of, timestamp_of_microseconds, to_microseconds

YEAR_2100_US = 4_102_444_800_000_000


@given(st.integers(0, YEAR_2100_US))
def test_microseconds_come_back_exactly(microseconds: int) -> None:
    stamp = timestamp_of_microseconds(microseconds)
    assert microseconds_of(stamp) == stamp.ToMicroseconds() == microseconds
    assert timestamp_of(seconds_of(stamp)) == stamp
    assert to_microseconds(seconds_of(stamp)) == microseconds


@given(st.floats(0, YEAR_2100_US / 1e6))
def test_seconds_keep_their_microseconds(seconds: float) -> None:
    assert (
        abs(seconds_of(timestamp_of(seconds)) - seconds) <= 1e-6
    )  # half a microsecond, and half a step of floats of this size


def test_nanoseconds_of_other_writers_are_cut() -> None:
    assert seconds_of(Timestamp(seconds=100, nanos=1_999)) == 100.000001


def test_a_message_that_is_no_time_does_not_raise_when_it_is_read() -> None:
    assert seconds_of(Timestamp(seconds=2**62, nanos=-1)) > 0


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 1e18])
def test_what_is_no_time_is_not_written(seconds: float) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        timestamp_of(seconds)
