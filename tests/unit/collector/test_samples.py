"""Samples as the store keeps them: bytes laid out for all replicas at once, which protobuf reads back."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrics_collector.core.samples import (
    SAMPLE_SIGNALS,
    Rows,
    encode,
    expand,
    identity,
    reading,
    schema_from,
    schema_message,
)
from metrics_collector.core.schema import COUNTER_COLUMN, GAUGE_COLUMN, SCALARS, schema_of
from metrics_collector.core.targets import RoleKey
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.signals import Counter, Gauge, Latency

CHAT = RoleKey(service="chat", role=types_pb2.ROLE_DECODE)
TTFT = schema_of(((Latency.TTFT, (0.1, 1.0, math.inf)),))


def rows(levels: list[list[float]], *, at_s: float = 1_700_000_000.25, decode_tps: float = math.nan) -> Rows:
    count = len(levels)
    signals = np.full((count, len(SAMPLE_SIGNALS)), np.nan)
    signals[:, SAMPLE_SIGNALS.index(pb.SIGNAL_DECODE_TPS)] = decode_tps
    return Rows(
        schema=TTFT,
        identities=[identity(CHAT, f"chat-{index}", collector="collector-0") for index in range(count)],
        at_s=np.full(count, at_s),
        states=np.full(count, pb.TARGET_STATE_UP, dtype=np.uint8),
        qualities=np.full(count, types_pb2.QUALITY_WARMING, dtype=np.uint8),
        signals=signals,
        levels=np.array(levels),
    )


def row(**known: float) -> list[float]:
    values = [math.nan] * TTFT.width
    for name, value in known.items():
        column = COUNTER_COLUMN[Counter(name)] if name in set(Counter) else GAUGE_COLUMN[Gauge(name)]
        values[column] = value
    values[SCALARS:] = [1.0, 2.0, 5.0, 9.5]
    return values


def test_protobuf_reads_what_was_laid_out() -> None:
    first, second = encode(rows([row(decode_tokens=2.0**53 - 1), row(awake=1.0)], decode_tps=12.5))

    read = pb.ReplicaSample.FromString(first.data)
    assert (first.replica, first.key, read.replica, read.service, read.role) == (
        "chat-0",
        CHAT,
        "chat-0",
        "chat",
        types_pb2.ROLE_DECODE,
    )
    assert (read.collector, read.state, read.quality) == (
        "collector-0",
        pb.TARGET_STATE_UP,
        types_pb2.QUALITY_WARMING,
    )
    assert read.sample_time.ToMicroseconds() == 1_700_000_000_250_000
    assert read.schema_fingerprint == TTFT.fingerprint
    assert read.levels[COUNTER_COLUMN[Counter.DECODE_TOKENS]] == 2.0**53 - 1
    assert list(read.levels[SCALARS:]) == [1.0, 2.0, 5.0, 9.5]
    assert read.levels[GAUGE_COLUMN[Gauge.AWAKE]] == -1.0, "what a page lacks is -1 in the store"
    assert read.signal_values[pb.SIGNAL_DECODE_TPS - 1] == 12.5
    assert pb.ReplicaSample.FromString(second.data).levels[GAUGE_COLUMN[Gauge.AWAKE]] == 1.0


def test_signals_stand_by_their_number_without_a_gap() -> None:
    assert list(SAMPLE_SIGNALS) == list(range(1, len(SAMPLE_SIGNALS) + 1))


def test_the_api_shows_signals_and_counters_by_name_and_no_raw_levels() -> None:
    (stored,) = encode(rows([row(decode_tokens=7.0, prompt_tokens=11.0, awake=0.0)], decode_tps=12.5))

    shown = expand(pb.ReplicaSample.FromString(stored.data))

    assert [(item.signal, item.measurement.value, item.measurement.quality) for item in shown.signals] == [
        (pb.SIGNAL_DECODE_TPS, 12.5, types_pb2.QUALITY_WARMING)
    ]
    assert (shown.generation_tokens_total, shown.prompt_tokens_total) == (7.0, 11.0)
    assert shown.HasField("awake")
    assert not shown.awake
    assert (len(shown.levels), len(shown.signal_values), shown.schema_fingerprint) == (0, 0, 0)


def test_a_counter_that_its_page_lacks_is_absent_from_the_api_not_zero() -> None:
    (stored,) = encode(rows([row(decode_tokens=7.0)]))

    shown = expand(pb.ReplicaSample.FromString(stored.data))

    assert shown.generation_tokens_total == 7.0
    assert not shown.HasField("prompt_tokens_total")
    assert not shown.HasField("awake")


def test_a_schema_comes_back_as_the_same() -> None:
    message = pb.SampleSchema.FromString(schema_message(TTFT).SerializeToString())

    assert schema_from(message) == TTFT
    assert schema_from(pb.SampleSchema(histograms=[pb.SchemaHistogram(latency=pb.LATENCY_UNSPECIFIED)])) is None


def test_levels_of_another_schema_are_not_read() -> None:
    (stored,) = encode(rows([row()]))

    assert reading(pb.ReplicaSample.FromString(stored.data), schema_of()) is None


@given(
    levels=st.lists(st.floats(0, 1e15) | st.just(math.nan), min_size=TTFT.width, max_size=TTFT.width),
    at_s=st.integers(0, 4_000_000_000_000_000).map(lambda micros: micros / 1e6),
)
def test_every_row_comes_back_as_it_was(levels: list[float], at_s: float) -> None:
    (stored,) = encode(rows([levels], at_s=at_s))
    message = pb.ReplicaSample.FromString(stored.data)

    back = reading(message, TTFT)

    assert back is not None
    assert back.values == pytest.approx(levels, nan_ok=True, abs=0, rel=0)
    assert message.sample_time.ToMicroseconds() == pytest.approx(at_s * 1e6, abs=1)
