"""The newest sample of each replica as bytes for the store, and back.

Ten thousand replicas a second are written, so no message is built one by one: what never changes of a replica's sample
is made once (``Identity``), and what does is laid out for all replicas of one schema at once. Both are runs of protobuf
fields, and one behind the other they are one ``ReplicaSample``.

Absent numbers, NaN in rows, are written as -1: nothing that a server counts is negative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from metrics_collector.core.schema import COUNTER_COLUMN, GAUGE_COLUMN, Reading, Schema, schema_of
from metrics_collector.core.targets import RoleKey
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.signals import LATENCIES, LATENCY_NUMBERS, SIGNAL_NUMBERS, Counter, Gauge

SAMPLE_SIGNALS: Final = tuple(SIGNAL_NUMBERS.values())
"""The order of ``Rows.signals``: by number, from 1 without a gap."""

_ABSENT: Final = -1.0
_SECONDS_BYTES: Final = 5
_NANOS_BYTES: Final = 5


class Identity(NamedTuple):
    """Whose sample it is. ``head`` is the part of its bytes that stays."""

    key: RoleKey
    replica: str
    head: bytes


def identity(key: RoleKey, replica: str, *, collector: str) -> Identity:
    """Made once for each replica of a collector."""
    message = pb.ReplicaSample(replica=replica, service=key.service, role=key.role, collector=collector)
    return Identity(key, replica, message.SerializeToString())


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Samples of n replicas of one schema. Times are seconds on the store's clock.

    ``states`` and ``qualities`` are numbers of ``TargetState`` and ``Quality``; ``signals`` is n by
    ``len(SAMPLE_SIGNALS)``, ``levels`` n by ``schema.width``; NaN where there is none.
    """

    schema: Schema
    identities: Sequence[Identity]
    at_s: NDArray[np.float64]
    states: NDArray[np.uint8]
    qualities: NDArray[np.uint8]
    signals: NDArray[np.float64]
    levels: NDArray[np.float64]


class EncodedSample(NamedTuple):
    """One replica's sample as the store keeps it."""

    key: RoleKey
    replica: str
    data: bytes


def encode(rows: Rows) -> list[EncodedSample]:
    """The samples of ``rows``, in order."""
    count = len(rows.identities)
    out = np.empty(count, dtype=_layout(len(SAMPLE_SIGNALS), rows.schema.width))
    for name, tag in _tags(len(SAMPLE_SIGNALS), rows.schema.width).items():
        out[name] = np.frombuffer(tag, dtype=np.uint8)
    micros = np.round(rows.at_s * 1e6).astype(np.int64)
    _put_varint(out["seconds"], micros // 1_000_000)
    _put_varint(out["nanos"], micros % 1_000_000 * 1000)
    out["state"] = rows.states
    out["quality"] = rows.qualities
    out["fingerprint"] = rows.schema.fingerprint
    for name, values in (("signals", rows.signals), ("levels", rows.levels)):
        out[name] = values
        out[name][np.isnan(values)] = _ABSENT
    size = out.dtype.itemsize
    tail = out.tobytes()
    return [
        EncodedSample(item.key, item.replica, item.head + tail[place : place + size])
        for item, place in zip(rows.identities, range(0, count * size, size), strict=True)
    ]


def expand(stored: pb.ReplicaSample) -> pb.ReplicaSample:
    """``stored`` as the API shows it: signals as messages, the counters by name, without the raw levels."""
    shown = pb.ReplicaSample()
    shown.CopyFrom(stored)
    for name in ("levels", "signal_values", "schema_fingerprint", "quality"):
        shown.ClearField(name)
    for number, value in zip(SAMPLE_SIGNALS, stored.signal_values, strict=False):
        if value >= 0:
            measurement = types_pb2.Measurement(value=value, quality=stored.quality, reported=1, expected=1)
            shown.signals.add(signal=number, measurement=measurement)
    levels = stored.levels
    if len(levels) > COUNTER_COLUMN[Counter.DECODE_TOKENS]:
        prompt, generated = levels[COUNTER_COLUMN[Counter.PROMPT_TOKENS]], levels[COUNTER_COLUMN[Counter.DECODE_TOKENS]]
        awake = levels[GAUGE_COLUMN[Gauge.AWAKE]]
        if prompt >= 0:
            shown.prompt_tokens_total = prompt
        if generated >= 0:
            shown.generation_tokens_total = generated
        if awake >= 0:
            shown.awake = awake > 0
    return shown


def reading(stored: pb.ReplicaSample, schema: Schema) -> Reading | None:
    """The page that ``stored`` was made from; None where its levels are not of ``schema``."""
    if stored.schema_fingerprint != schema.fingerprint or len(stored.levels) != schema.width:
        return None
    values = np.array(stored.levels, dtype=np.float64)
    values[values < 0] = np.nan
    return Reading(schema, values.tolist())


def schema_message(schema: Schema) -> pb.SampleSchema:
    """What the store keeps of a schema."""
    return pb.SampleSchema(
        histograms=[
            pb.SchemaHistogram(latency=LATENCY_NUMBERS[latency], upper_bounds_s=bounds_s)
            for latency, bounds_s in schema.bounds_s
        ]
    )


def schema_from(message: pb.SampleSchema) -> Schema | None:
    """The schema that was stored; None for one with a latency that is not known here."""
    if any(item.latency not in LATENCIES for item in message.histograms):
        return None
    return schema_of(tuple((LATENCIES[item.latency], tuple(item.upper_bounds_s)) for item in message.histograms))


def _put_varint(place: NDArray[np.uint8], values: NDArray[np.int64]) -> None:
    """``values`` as varints that take the whole width of ``place``: leading zeros are allowed, and lengths the same."""
    last = place.shape[1] - 1
    for index in range(last + 1):
        place[:, index] = (values >> (7 * index)) & 0x7F | (0x80 if index < last else 0)


def _field(name: str) -> int:
    return pb.ReplicaSample.DESCRIPTOR.fields_by_name[name].number


def _tag(name: str, wire_type: int) -> bytes:
    return bytes([_field(name) << 3 | wire_type])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


@lru_cache(maxsize=1024)
def _tags(signals: int, width: int) -> dict[str, bytes]:
    """What stands before each value: its tag, and the length of a packed or nested one."""
    return {
        # Timestamp: seconds is its field 1, nanos field 2.
        "seconds_tag": _tag("sample_time", 2) + bytes([2 + _SECONDS_BYTES + _NANOS_BYTES, 0x08]),
        "nanos_tag": b"\x10",
        "state_tag": _tag("state", 0),
        "quality_tag": _tag("quality", 0),
        "fingerprint_tag": _tag("schema_fingerprint", 1),
        "signals_tag": _tag("signal_values", 2) + _varint(8 * signals),
        "levels_tag": _tag("levels", 2) + _varint(8 * width),
    }


@lru_cache(maxsize=1024)
def _layout(signals: int, width: int) -> np.dtype[np.void]:
    tags = _tags(signals, width)
    values: dict[str, tuple[str, int]] = {
        "seconds": ("u1", _SECONDS_BYTES),
        "nanos": ("u1", _NANOS_BYTES),
        "state": ("u1", 0),
        "quality": ("u1", 0),
        "fingerprint": ("<u8", 0),
        "signals": ("<f8", signals),
        "levels": ("<f8", width),
    }
    fields: list[tuple[str, str] | tuple[str, str, int | tuple[int, ...]]] = []
    for name, (kind, length) in values.items():
        fields.append((f"{name}_tag", "u1", (len(tags[f"{name}_tag"]),)))
        fields.append((name, kind, (length,)) if length else (name, kind))
    return np.dtype(fields)
