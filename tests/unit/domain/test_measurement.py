"""A measurement keeps its value, quality and counts on the wire, and a message that is none is missing."""

import math

import pytest

from trimtab.api.common.v1 import types_pb2
from trimtab.domain.measurement import Measurement, measurement_from_proto, measurement_to_proto
from trimtab.domain.vocabulary import Quality

ABSENT = (Quality.MISSING, Quality.STALE, Quality.WARMING)
VALUE = 12.5


@pytest.mark.parametrize("quality", Quality)
def test_every_quality_comes_back_as_it_was_written(quality: Quality) -> None:
    values = [None] if quality is Quality.MISSING else [VALUE, 0.0, *([None] if quality in ABSENT else [])]
    for value in values:
        given = Measurement(value, quality, reported=3, expected=4, detail="1 refused")
        message = types_pb2.Measurement.FromString(measurement_to_proto(given).SerializeToString())
        assert measurement_from_proto(message) == given
        assert message.quality == types_pb2.Quality.Value(f"QUALITY_{quality.name}")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_value_that_is_none_is_missing(value: float) -> None:
    found = measurement_from_proto(types_pb2.Measurement(value=value, quality=types_pb2.QUALITY_OK))
    assert (found.value, found.quality) == (None, Quality.MISSING)


@pytest.mark.parametrize("quality", [types_pb2.QUALITY_OK, types_pb2.QUALITY_PARTIAL, types_pb2.QUALITY_RESET])
def test_a_read_without_a_value_is_missing(quality: types_pb2.Quality.ValueType) -> None:
    assert measurement_from_proto(types_pb2.Measurement(quality=quality)).quality is Quality.MISSING


def test_a_quality_of_a_later_release_is_missing() -> None:
    later = types_pb2.Measurement(value=VALUE, quality=types_pb2.Quality.ValueType(77))
    assert measurement_from_proto(later).value is None
    assert measurement_from_proto(types_pb2.Measurement(value=VALUE)).quality is Quality.MISSING
