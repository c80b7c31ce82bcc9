"""Which families of a page hold which quantity: the names, label rules and limits of a dialect, as data.

A dialect is a table of families. The first of a family's names that is on the page is the one that is read, so a
page that has the old and the new name of a renamed family is not counted twice. Adding an engine or a release
means adding rows. Names are sample names as the text format writes them (counters end in ``_total``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Quantity(StrEnum):
    """What a family measures, whatever it is called."""

    RUNNING = "running"
    WAITING = "waiting"
    KV_USAGE = "kv_usage"
    AWAKE = "awake"
    START_TIME = "start_time"
    PROMPT_TOKENS = "prompt_tokens"
    PROMPT_COMPUTED = "prompt_computed"
    PROMPT_CACHE_HIT = "prompt_cache_hit"
    PROMPT_CACHED = "prompt_cached"
    GENERATION_TOKENS = "generation_tokens"
    PREFIX_QUERIES = "prefix_queries"
    PREFIX_HITS = "prefix_hits"
    PREFIX_HIT_TOKENS = "prefix_hit_tokens"
    EXTERNAL_HIT_TOKENS = "external_hit_tokens"
    PREEMPTIONS = "preemptions"
    FINISHED = "finished"
    TTFT = "ttft"
    TBT = "tbt"
    TPOT = "tpot"
    QUEUE = "queue"
    E2E = "e2e"


class Kind(StrEnum):
    """How a family's samples are read."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Combine(StrEnum):
    """How the series of one server (``engine`` ranks, models, reasons) become one number."""

    ADD = "add"
    # The mean, and the maximum beside it.
    MEAN = "mean"
    # The least: a server is awake when all of its engines are.
    LEAST = "least"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One quantity and where to read it.

    ``where`` keeps only series whose label has the given value, ``unless`` leaves out those whose label has one of
    the given values. ``largest`` is the largest plausible value: anything above it is refused, as are NaN, infinities
    and negatives.
    """

    quantity: Quantity
    kind: Kind
    names: tuple[str, ...]
    combine: Combine = Combine.ADD
    where: tuple[str, str] | None = None
    unless: tuple[str, tuple[str, ...]] | None = None
    largest: float = 1e15

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether a series with these labels belongs to the quantity."""
        if self.where is not None and labels.get(self.where[0]) != self.where[1]:
            return False
        return self.unless is None or labels.get(self.unless[0]) not in self.unless[1]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The families of one engine. ``required`` tells its page from any other: one of them must be there."""

    name: str
    families: tuple[Family, ...]
    required: frozenset[Quantity]

    def sample_names(self) -> tuple[str, ...]:
        """Every sample name that the table reads, for ``/metrics/?name[]=…``; sorted, without duplicates."""
        names: set[str] = set()
        for family in self.families:
            for name in family.names:
                suffixes = ("_bucket", "_sum", "_count") if family.kind is Kind.HISTOGRAM else ("",)
                names.update(name + suffix for suffix in suffixes)
        return tuple(sorted(names))


_MOST_REQUESTS = 1e6
_MOST_SECONDS = 1e12


def _gauge(quantity: Quantity, *names: str) -> Family:
    return Family(quantity=quantity, kind=Kind.GAUGE, names=names, largest=_MOST_REQUESTS)


def _counter(quantity: Quantity, *names: str, where: tuple[str, str] | None = None) -> Family:
    return Family(quantity=quantity, kind=Kind.COUNTER, names=names, where=where)


def _histogram(quantity: Quantity, *names: str) -> Family:
    return Family(quantity=quantity, kind=Kind.HISTOGRAM, names=names, largest=_MOST_SECONDS)


# vLLM's V1 engine, 0.8 to 0.32. A name that a later release dropped stands after the one that replaced it.
VLLM_V1 = Dialect(
    name="vllm-v1",
    required=frozenset({Quantity.RUNNING, Quantity.GENERATION_TOKENS}),
    families=(
        _gauge(Quantity.RUNNING, "vllm:num_requests_running"),
        _gauge(Quantity.WAITING, "vllm:num_requests_waiting"),
        Family(
            quantity=Quantity.KV_USAGE,
            kind=Kind.GAUGE,
            names=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            combine=Combine.MEAN,
            largest=1.0 + 1e-6,
        ),
        Family(
            quantity=Quantity.AWAKE,
            kind=Kind.GAUGE,
            names=("vllm:engine_sleep_state",),
            combine=Combine.LEAST,
            where=("sleep_state", "awake"),
            largest=1.0,
        ),
        Family(
            quantity=Quantity.START_TIME,
            kind=Kind.GAUGE,
            names=("process_start_time_seconds",),
            combine=Combine.LEAST,
            largest=1e11,
        ),
        _counter(Quantity.PROMPT_TOKENS, "vllm:prompt_tokens_total"),
        _counter(Quantity.PROMPT_COMPUTED, "vllm:prompt_tokens_by_source_total", where=("source", "local_compute")),
        _counter(Quantity.PROMPT_CACHE_HIT, "vllm:prompt_tokens_by_source_total", where=("source", "local_cache_hit")),
        _counter(Quantity.PROMPT_CACHED, "vllm:prompt_tokens_cached_total"),
        _counter(Quantity.GENERATION_TOKENS, "vllm:generation_tokens_total"),
        # The ratio of hits to queries holds in blocks too; only the newer names are known to count tokens.
        _counter(Quantity.PREFIX_QUERIES, "vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        _counter(Quantity.PREFIX_HITS, "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        _counter(Quantity.PREFIX_HIT_TOKENS, "vllm:prefix_cache_hits_total"),
        _counter(Quantity.EXTERNAL_HIT_TOKENS, "vllm:external_prefix_cache_hits_total"),
        _counter(Quantity.PREEMPTIONS, "vllm:num_preemptions_total"),
        # vLLM counts aborted and failed requests as "success" too; they are not what a service finished.
        Family(
            quantity=Quantity.FINISHED,
            kind=Kind.COUNTER,
            names=("vllm:request_success_total",),
            unless=("finished_reason", ("abort", "error")),
        ),
        _histogram(Quantity.TTFT, "vllm:time_to_first_token_seconds"),
        _histogram(Quantity.TBT, "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        _histogram(Quantity.TPOT, "vllm:request_time_per_output_token_seconds"),
        _histogram(Quantity.QUEUE, "vllm:request_queue_time_seconds"),
        _histogram(Quantity.E2E, "vllm:e2e_request_latency_seconds"),
    ),
)
