"""The `vllm:` families of vLLM 0.32's `/metrics`, in its order, with its help texts and bucket edges.

Gauges are written when an iteration ends, never when the page is read: a server that sleeps, is paused or is wedged
shows what was true at its last iteration, as the real one does. Counters of the prefix cache move at admission, those
of prompt tokens at the first token. The sleep families appear at the first sleep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from simulator.core.edges import (
    ITERATION_EDGES,
    LATENCY_EDGES,
    PARAM_N_EDGES,
    PREEMPTION_EDGES,
    SLEEP_EDGES,
    TOKEN_GAP_EDGES,
    TTFT_EDGES,
)
from simulator.core.engine import Engine
from simulator.core.limits import EngineLimits
from simulator.core.requests import FinishedRequest, FinishReason, StepOutcome
from simulator.server.exposition import Counter, Gauge, Histogram, Labels, Page

_FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
_CACHE_CONFIG_DEFAULTS: Mapping[str, str] = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "auto",
    "num_cpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "False",
}


def token_edges(max_model_len: int) -> tuple[float, ...]:
    """vLLM's 1-2-5 bucket edges up to the model's length."""
    edges: list[float] = []
    decade = 1
    while True:
        for mantissa in (1, 2, 5):
            edge = mantissa * decade
            if edge > max_model_len:
                return tuple(edges)
            edges.append(float(edge))
        decade *= 10


@dataclasses.dataclass(frozen=True, slots=True)
class RequestParams:
    """The parameters of a request, as the histograms show them."""

    n: int
    max_tokens: int


class VllmMetrics:
    """Writes the engine's families into a page; `created_s` is unix time."""

    def __init__(
        self, page: Page, *, model_name: str, engine: str, limits: EngineLimits, kv_cache_bytes: int, created_s: float
    ) -> None:
        self._page = page
        self._labels: Labels = (("engine", engine), ("model_name", model_name))
        self._model_name = model_name
        self._created_s = created_s
        self._tokens = token_edges(limits.max_model_len)
        self._sleep_duration: Histogram | None = None
        self._sleep_in_flight: Gauge | None = None
        self._add_scalars()
        self._add_histograms()
        page.add(Gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", ())).set(
            1.0, self._cache_config(engine, limits, kv_cache_bytes)
        )

    def record_gauges(self, engine: Engine) -> None:
        """Write what the scheduler's state is; called when an iteration has ended or requests were aborted.

        As in vLLM, what arrives during an iteration is not known to the scheduler before the next one.
        """
        labels, passed_over = self._labels, engine.num_passed_over
        self._running.set(float(engine.num_running), labels)
        self._waiting.set(float(passed_over + engine.num_deferred), labels)
        self._waiting_by_reason.set(float(passed_over), (*labels, ("reason", "capacity")))
        self._waiting_by_reason.set(float(engine.num_deferred), (*labels, ("reason", "deferred")))
        self._kv_usage.set(engine.pool.usage_ratio, labels)

    def record_counters(self, engine: Engine) -> None:
        """Take over the engine's running totals."""
        counters, labels = engine.counters, self._labels
        self._prefix_queries.set_total(counters.prefix_queries_tokens, labels)
        self._prefix_hits.set_total(counters.prefix_hits_tokens, labels)
        self._external_queries.set_total(counters.external_queries_tokens, labels)
        self._external_hits.set_total(counters.external_hits_tokens, labels)
        self._preemptions.set_total(counters.preemptions, labels)
        self._cached_by_source.set_total(counters.prefix_hits_tokens, (*labels, ("source", "device")))
        self._cached_by_source.set_total(counters.external_hits_tokens, (*labels, ("source", "p2p")))

    def record_step(self, outcome: StepOutcome) -> None:
        """Count one iteration's tokens and gaps."""
        labels = self._labels
        if outcome.emitted:
            # Like vLLM's: a prompt counts whole, at its first token, and iterations without output are left out.
            prompts = sum(f.prompt_tokens - f.cached_tokens - f.external_tokens for f in outcome.first_tokens)
            self._iteration_tokens.observe(float(prompts + len(outcome.emitted)), labels)
            self._generation_tokens.add(len(outcome.emitted), labels)
        for gap_s, times in outcome.token_gaps:
            self._token_gap.observe(gap_s, labels, times=times)
        for first in outcome.first_tokens:
            self._ttft.observe(first.time_to_first_token_s, labels)
            self._prompt_tokens.add(first.prompt_tokens, labels)
            cached = first.cached_tokens + first.external_tokens
            self._prompt_tokens_cached.add(cached, labels)
            by_source = (
                ("local_compute", first.prompt_tokens - cached),
                ("local_cache_hit", first.cached_tokens),
                ("external_kv_transfer", first.external_tokens),
            )
            for source, tokens in by_source:
                self._by_source.add(tokens, (*labels, ("source", source)))

    def record_finished(self, finished: FinishedRequest, params: RequestParams) -> None:
        """Record a request that ended, whatever ended it."""
        labels = self._labels
        request = finished.request
        self._success.add(1, (*labels, ("finished_reason", finished.reason.value)))
        self._request_prompt.observe(float(request.prompt_tokens), labels)
        self._request_generation.observe(float(finished.generated_tokens), labels)
        self._request_max_generation.observe(float(finished.generated_tokens), labels)
        self._params_n.observe(float(params.n), labels)
        self._params_max_tokens.observe(float(params.max_tokens), labels)
        self._e2e.observe(max(0.0, finished.finished_s - finished.arrival_s), labels)
        scheduled_s = finished.scheduled_s if finished.scheduled_s is not None else finished.finished_s
        first_s = finished.first_token_s if finished.first_token_s is not None else scheduled_s
        last_s = finished.last_token_s if finished.last_token_s is not None else first_s
        self._queue_time.observe(max(0.0, scheduled_s - finished.arrival_s), labels)
        self._inference_time.observe(max(0.0, last_s - scheduled_s), labels)
        self._prefill_time.observe(max(0.0, first_s - scheduled_s), labels)
        self._decode_time.observe(max(0.0, last_s - first_s), labels)
        tpot_s = (last_s - first_s) / (finished.generated_tokens - 1) if finished.generated_tokens > 1 else 0.0
        self._tpot.observe(tpot_s, labels)
        self._num_preemptions.observe(float(finished.preemptions), labels)
        computed = request.prompt_tokens - finished.cached_tokens - finished.external_tokens
        self._kv_computed.observe(float(computed), labels)

    def record_sleep_state(self, gauges: Mapping[str, float]) -> None:
        """Write `engine_sleep_state`."""
        for state, value in gauges.items():
            self._sleep_state.set(value, (*self._labels, ("sleep_state", state)))

    def record_rejection(self) -> None:
        """Count a request that the queue limit refused."""
        self._rejections.add(1, (("model_name", self._model_name), ("reason", "max_num_queued_reqs")))

    def sleep_operation_started(self, operation: str) -> None:
        """A sleep or a wake began; the families appear with the first one."""
        if self._sleep_in_flight is None:
            self._sleep_duration = self._page.add(
                Histogram(
                    "vllm:sleep_mode_operation_duration_seconds",
                    "Duration of one sleep-mode operation.",
                    SLEEP_EDGES,
                    (),
                )
            )
            self._sleep_in_flight = self._page.add(
                Gauge("vllm:sleep_mode_operations_in_flight", "Sleep-mode operations currently awaited.", ())
            )
        self._sleep_in_flight.set(1.0, (("operation", operation),))

    def sleep_operation_ended(self, operation: str, duration_s: float, now_s: float) -> None:
        """The operation is over, well or not; `now_s` is unix time."""
        labels = (("operation", operation),)
        if self._sleep_in_flight is not None and self._sleep_duration is not None:
            self._sleep_in_flight.set(0.0, labels)
            self._sleep_duration.observe(duration_s, labels, now_s=now_s)

    def finished_count(self, reason: FinishReason) -> float:
        """How many requests ended for this reason."""
        return self._success.value((*self._labels, ("finished_reason", reason.value)))

    def _children(self, label: str, values: tuple[str, ...]) -> tuple[Labels, ...]:
        return tuple((*self._labels, (label, value)) for value in values)

    def _counter(self, name: str, help_text: str, children: tuple[Labels, ...] | None = None) -> Counter:
        labels = (self._labels,) if children is None else children
        return self._page.add(Counter(name, help_text, labels, created_s=self._created_s))

    def _gauge(self, name: str, help_text: str, children: tuple[Labels, ...] | None = None) -> Gauge:
        return self._page.add(Gauge(name, help_text, (self._labels,) if children is None else children))

    def _histogram(self, name: str, help_text: str, edges: tuple[float, ...]) -> Histogram:
        return self._page.add(Histogram(name, help_text, edges, (self._labels,), created_s=self._created_s))

    def _add_scalars(self) -> None:
        for what, verb in (("flops", ""), ("read_bytes", "read from"), ("write_bytes", "written to")):
            text = (
                "Estimated number of floating point operations per GPU (for Model Flops Utilization calculations)."
                if not verb
                else f"Estimated number of bytes {verb} memory per GPU (for Model Flops Utilization calculations)."
            )
            self._counter(f"vllm:estimated_{what}_per_gpu_total", text)
        self._running = self._gauge("vllm:num_requests_running", "Number of requests in model execution batches.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.")
        self._waiting_by_reason = self._gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
            "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all "
            "reasons equals vllm:num_requests_waiting.",
            self._children("reason", ("capacity", "deferred")),
        )
        self._sleep_state = self._gauge(
            "vllm:engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
            "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
            self._children("sleep_state", ("awake", "weights_offloaded", "discard_all")),
        )
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self._add_cache_counters()
        self._preemptions = self._counter(
            "vllm:num_preemptions_total", "Cumulative number of preemption from the engine."
        )
        self._add_token_counters()
        self._success = self._counter(
            "vllm:request_success_total",
            "Count of successfully processed requests.",
            self._children("finished_reason", _FINISHED_REASONS),
        )
        model = ("model_name", self._model_name)
        self._rejections = self._counter(
            "vllm:admission_rejections_total",
            "Number of admission attempts rejected by a queue limit, by reason.",
            tuple((model, ("reason", reason)) for reason in ("max_num_queued_reqs", "max_num_queued_tokens")),
        )

    def _add_cache_counters(self) -> None:
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens."
        )
        self._prefix_hits = self._counter(
            "vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens."
        )
        shared = "from KV connector cross-instance cache sharing, in terms of number of"
        self._external_queries = self._counter(
            "vllm:external_prefix_cache_queries_total", f"External prefix cache queries {shared} queried tokens."
        )
        self._external_hits = self._counter(
            "vllm:external_prefix_cache_hits_total", f"External prefix cache hits {shared} cached tokens."
        )
        self._counter("vllm:mm_cache_queries_total", "Multi-modal cache queries, in terms of number of queried items.")
        self._counter("vllm:mm_cache_hits_total", "Multi-modal cache hits, in terms of number of cached items.")

    def _add_token_counters(self) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.")
        self._by_source = self._counter(
            "vllm:prompt_tokens_by_source_total",
            "Number of prompt tokens by source.",
            self._children("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
        )
        self._prompt_tokens_cached = self._counter(
            "vllm:prompt_tokens_cached_total", "Number of cached prompt tokens (local + external)."
        )
        self._cached_by_source = self._counter(
            "vllm:prompt_tokens_cached_by_source_total",
            "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to "
            "DRAM), disk, p2p (transferred from another vLLM instance) or external_unspecified. Counted at "
            "admission; sums to vllm:prefix_cache_hits + vllm:external_prefix_cache_hits.",
            self._children("source", ("device", "host", "p2p", "disk", "external_unspecified")),
        )
        self._generation_tokens = self._counter(
            "vllm:generation_tokens_total", "Number of generation tokens processed."
        )

    def _add_histograms(self) -> None:
        add, tokens = self._histogram, self._tokens
        prefill = "Number of prefill tokens processed."
        self._request_prompt = add("vllm:request_prompt_tokens", prefill, tokens)
        self._request_generation = add(
            "vllm:request_generation_tokens", "Number of generation tokens processed.", tokens
        )
        self._iteration_tokens = add(
            "vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", ITERATION_EDGES
        )
        self._request_max_generation = add(
            "vllm:request_max_num_generation_tokens",
            "Histogram of maximum number of requested generation tokens.",
            tokens,
        )
        self._params_n = add("vllm:request_params_n", "Histogram of the n request parameter.", PARAM_N_EDGES)
        self._params_max_tokens = add(
            "vllm:request_params_max_tokens", "Histogram of the max_tokens request parameter.", tokens
        )
        self._ttft = add("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", TTFT_EDGES)
        self._token_gap = add(
            "vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", TOKEN_GAP_EDGES
        )
        self._tpot = add(
            "vllm:request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            TOKEN_GAP_EDGES,
        )
        self._e2e = add(
            "vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", LATENCY_EDGES
        )
        phase = "Histogram of time spent in {} phase for request."
        self._queue_time = add("vllm:request_queue_time_seconds", phase.format("WAITING"), LATENCY_EDGES)
        self._inference_time = add("vllm:request_inference_time_seconds", phase.format("RUNNING"), LATENCY_EDGES)
        self._prefill_time = add("vllm:request_prefill_time_seconds", phase.format("PREFILL"), LATENCY_EDGES)
        self._decode_time = add("vllm:request_decode_time_seconds", phase.format("DECODE"), LATENCY_EDGES)
        self._num_preemptions = add(
            "vllm:request_num_preemptions",
            "Histogram of the number of times a request was preempted.",
            PREEMPTION_EDGES,
        )
        self._kv_computed = add(
            "vllm:request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            tokens,
        )

    @staticmethod
    def _cache_config(engine: str, limits: EngineLimits, kv_cache_bytes: int) -> Labels:
        own = {
            "block_size": str(limits.block_size),
            "effective_attention_block_size": str(limits.block_size),
            "enable_prefix_caching": str(limits.enable_prefix_caching),
            "engine": engine,
            "kv_cache_max_concurrency": str(limits.kv_capacity_tokens / limits.max_model_len),
            "kv_cache_memory_bytes": str(kv_cache_bytes),
            "kv_cache_size_tokens": str(limits.kv_capacity_tokens),
            "num_gpu_blocks": str(limits.num_gpu_blocks),
        }
        return tuple(sorted({**_CACHE_CONFIG_DEFAULTS, **own}.items()))
