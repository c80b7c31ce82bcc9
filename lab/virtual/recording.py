"""What a vLLM server would show of an engine on virtual time, as a reading of the collector instead of a page.

The columns are those that the collector takes from a page of vLLM 0.32: counters of prompts move at their first token,
histograms have vLLM's edges, requests count when they end, and what came during an iteration is not waiting before it
is over. Two things differ from a page. Gauges are those of the moment, where a page shows the end of the last
iteration. Gaps between tokens are the means of runs of iterations that the engine did at once, each as often as there
were tokens in the run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

from metrics_collector.core.schema import COUNTER_COLUMN, GAUGE_COLUMN, SCALARS, Reading, Schema, schema_of
from simulator.core.edges import LATENCY_EDGES, TOKEN_GAP_EDGES, TTFT_EDGES
from simulator.core.event_engine import EventEngine
from simulator.core.requests import EngineGauges, FinishedRequest, FinishReason
from trimtab.domain.signals import Counter, Gauge, Latency

_EDGES: tuple[tuple[Latency, tuple[float, ...]], ...] = (
    (Latency.TTFT, TTFT_EDGES),
    (Latency.TBT, TOKEN_GAP_EDGES),
    (Latency.TPOT, TOKEN_GAP_EDGES),
    (Latency.QUEUE, LATENCY_EDGES),
    (Latency.E2E, LATENCY_EDGES),
)
SCHEMA: Schema = schema_of(tuple((latency, (*edges, math.inf)) for latency, edges in _EDGES))
"""The schema of every reading that is made here."""
_AWAKE = GAUGE_COLUMN[Gauge.AWAKE]
_START = GAUGE_COLUMN[Gauge.START_TIME_S]
_RUNNING = GAUGE_COLUMN[Gauge.RUNNING]
_WAITING = GAUGE_COLUMN[Gauge.WAITING]
_KV = GAUGE_COLUMN[Gauge.KV_USAGE_RATIO]
_KV_MAX = GAUGE_COLUMN[Gauge.KV_USAGE_MAX_RATIO]
_PREFILL = COUNTER_COLUMN[Counter.PREFILL_TOKENS]
_CACHED = COUNTER_COLUMN[Counter.PREFILL_CACHED_TOKENS]
_PROMPT = COUNTER_COLUMN[Counter.PROMPT_TOKENS]
_DECODE = COUNTER_COLUMN[Counter.DECODE_TOKENS]
_FINISHED = COUNTER_COLUMN[Counter.FINISHED]
_PREEMPTIONS = COUNTER_COLUMN[Counter.PREEMPTIONS]
_QUERIES = COUNTER_COLUMN[Counter.PREFIX_QUERIES]
_HITS = COUNTER_COLUMN[Counter.PREFIX_HITS]
_PREFILL_SECONDS = COUNTER_COLUMN[Counter.PREFILL_SECONDS]
_PREFILL_REQUESTS = COUNTER_COLUMN[Counter.PREFILL_REQUESTS]
_COUNTED = (
    _PREFILL,
    _CACHED,
    _PROMPT,
    _DECODE,
    _FINISHED,
    _PREEMPTIONS,
    _QUERIES,
    _HITS,
    _PREFILL_SECONDS,
    _PREFILL_REQUESTS,
)
_ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)


class _Histogram:
    """Counts by bucket, the last of them beyond the largest edge, and the sum."""

    __slots__ = ("counts", "edges", "total_s")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count a value; an edge belongs to the bucket below it."""
        self.counts[bisect_left(self.edges, seconds)] += times
        self.total_s += seconds * times


def waiting_shown(engine: EventEngine, gauges: EngineGauges) -> int:
    """The waiting requests that a page shows, of an engine that gave `gauges` just now."""
    return engine.num_passed_over + gauges.deferred


class EngineRecorder:
    """Keeps what a server counts beside its engine; it takes over the engine's `gaps` and `first_tokens`.

    The caller reports every request that ended, aborted ones included; `asleep` is the server's state.
    """

    __slots__ = ("_engine", "_frozen", "_histograms", "_row", "asleep")

    def __init__(self, engine: EventEngine, *, start_time_s: float = 0.0) -> None:
        """`start_time_s` is when the server's process began: where it changes, the collector sees a restart."""
        engine.gaps = []
        engine.first_tokens = []
        self._engine = engine
        self._histograms = {latency: _Histogram(edges) for latency, edges in _EDGES}
        # What is not counted here is absent, as on a page that lacks it.
        self._row = [math.nan] * SCALARS
        for column in _COUNTED:
            self._row[column] = 0.0
        self._row[_START] = start_time_s
        self._frozen: Reading | None = None
        """What a sleeper has shown since it fell asleep."""
        self.asleep = False

    def finished(self, finished: FinishedRequest) -> None:
        """Count a request that ended, whatever ended it, as vLLM does."""
        self._frozen = None
        row, histograms = self._row, self._histograms
        if finished.reason in _ENDED_WELL:
            row[_FINISHED] += 1
        scheduled_s = finished.scheduled_s if finished.scheduled_s is not None else finished.finished_s
        first_s = finished.first_token_s if finished.first_token_s is not None else scheduled_s
        last_s = finished.last_token_s if finished.last_token_s is not None else first_s
        tokens = finished.generated_tokens
        row[_PREFILL_SECONDS] += max(0.0, first_s - scheduled_s)
        row[_PREFILL_REQUESTS] += 1
        histograms[Latency.QUEUE].observe(max(0.0, scheduled_s - finished.arrival_s))
        histograms[Latency.TPOT].observe((last_s - first_s) / (tokens - 1) if tokens > 1 else 0.0)
        histograms[Latency.E2E].observe(max(0.0, finished.finished_s - finished.arrival_s))

    def reading(self, now_s: float) -> Reading:
        """The values of the server's page at `now_s`, up to which the engine must have been advanced."""
        if self.asleep and self._frozen is not None:
            return self._frozen
        engine, row = self._engine, self._row
        gauges = engine.observe(now_s)
        self._count_first_tokens()
        self._count_gaps()
        row[_AWAKE] = 0.0 if self.asleep else 1.0
        row[_RUNNING] = gauges.running
        row[_WAITING] = waiting_shown(engine, gauges)
        row[_KV] = row[_KV_MAX] = gauges.kv_usage_ratio
        row[_DECODE] = gauges.generated_tokens
        row[_PREEMPTIONS] = gauges.preemptions
        row[_QUERIES] = engine.counters.prefix_queries_tokens
        row[_HITS] = engine.counters.prefix_hits_tokens
        values = row[:]
        for histogram in self._histograms.values():
            values += accumulate(histogram.counts)
            values.append(histogram.total_s)
        reading = Reading(SCHEMA, values)
        self._frozen = reading if self.asleep else None
        return reading

    def _count_first_tokens(self) -> None:
        first_tokens = self._engine.first_tokens
        if not first_tokens:
            return
        row, histogram = self._row, self._histograms[Latency.TTFT]
        for sequence in first_tokens:
            prompt = sequence.request.prompt_tokens
            row[_PROMPT] += prompt
            row[_CACHED] += sequence.cached_tokens
            row[_PREFILL] += prompt - sequence.cached_tokens - sequence.external_tokens
            if sequence.first_token_s is not None:
                histogram.observe(max(0.0, sequence.first_token_s - sequence.arrival_s))
        first_tokens.clear()

    def _count_gaps(self) -> None:
        gaps = self._engine.gaps
        if not gaps:
            return
        histogram = self._histograms[Latency.TBT]
        edges, counts, total_s = histogram.edges, histogram.counts, 0.0
        for seconds, times in gaps:
            counts[bisect_left(edges, seconds)] += times
            total_s += seconds * times
        histogram.total_s += total_s
        gaps.clear()
