"""Messages as text and documents: the smallest pieces of every view."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC
from typing import Any

from google.protobuf import json_format, message, timestamp_pb2

from trimtab.api.common.v1 import types_pb2

MISSING = "–"
UNSURE = "~"
"""The mark after a value that is less than ok, where there is no room for the reason."""


def message_dict(proto: message.Message) -> dict[str, Any]:
    """Protobuf's JSON mapping with the field names of the proto files and every scalar spelt out."""
    document: dict[str, Any] = json_format.MessageToDict(
        proto, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return document


def message_dicts(protos: Iterable[message.Message]) -> list[dict[str, Any]]:
    """`message_dict` of each."""
    return [message_dict(proto) for proto in protos]


def measurement_text(
    measurement: types_pb2.Measurement, *, digits: int = 1, unit: str = "", brief: bool = False
) -> str:
    """A value, with why when it is less than ok (`brief`: a mark alone); a dash when there is none."""
    if not measurement.HasField("value"):
        return MISSING
    text = f"{measurement.value:.{digits}f}{unit}"
    if measurement.quality == types_pb2.QUALITY_OK:
        return text
    if brief:
        return text + UNSURE
    if measurement.quality == types_pb2.QUALITY_PARTIAL:
        return f"{text} ({measurement.reported}/{measurement.expected})"
    return f"{text} ({short_name(types_pb2.Quality.Name(measurement.quality), 'QUALITY_')})"


def short_name(name: str, prefix: str) -> str:
    """LIFE_CYCLE_ACTIVE → active."""
    return name.removeprefix(prefix).lower().replace("_", "-")


def time_text(stamp: timestamp_pb2.Timestamp) -> str:
    """Local wall-clock time, to the second."""
    if not stamp.seconds:
        return MISSING
    return stamp.ToDatetime(tzinfo=UTC).astimezone().strftime("%H:%M:%S")
