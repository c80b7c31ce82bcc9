"""Readings from the first page reader."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from metrics_collector.core.dialect import VLLM_V1, Dialect, Quantity
from metrics_collector.core.exposition import PageError as PageError
from metrics_collector.core.exposition import PageReader as OldReader
from metrics_collector.core.schema import COUNTERS, Latency, Reading, schema_of
from metrics_collector.core.series import _levels

_LATENCIES = {
    Latency.TTFT: Quantity.TTFT,
    Latency.TBT: Quantity.TBT,
    Latency.TPOT: Quantity.TPOT,
    Latency.QUEUE: Quantity.QUEUE,
    Latency.E2E: Quantity.E2E,
}


class Hint(NamedTuple):
    """Nothing is remembered."""


def load_dialects() -> Sequence[Dialect]:
    """The one there is."""
    return (VLLM_V1,)


class PageReader:
    """As ``core.page`` has it."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self._reader = OldReader(dialects[0])

    def sample_names(self) -> tuple[str, ...]:
        """What to ask for."""
        return self._reader.dialect.sample_names()

    def read(self, page: bytes, hint: Hint | None) -> tuple[Reading, Hint]:
        """One page."""
        sample = self._reader.read(page)
        gauges = sample.gauges
        values = [
            gauges.get(Quantity.RUNNING, math.nan),
            gauges.get(Quantity.WAITING, math.nan),
            gauges.get(Quantity.KV_USAGE, math.nan),
            math.nan if sample.kv_usage_max_ratio is None else sample.kv_usage_max_ratio,
            gauges.get(Quantity.AWAKE, math.nan),
            gauges.get(Quantity.START_TIME, math.nan),
        ]
        levels = {counter.value: level for counter, level in _levels(sample).items()}
        values += [levels.get(counter.value, math.nan) for counter in COUNTERS]
        bounds = []
        for latency, quantity in _LATENCIES.items():
            histogram = sample.histograms.get(quantity)
            if histogram is not None:
                bounds.append((latency, histogram.bounds_s))
                values += (*histogram.cumulative, histogram.sum_s)
        return Reading(schema_of(tuple(bounds)), values, sample.rejected), Hint()
