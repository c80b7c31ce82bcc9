"""One simulated vLLM server: its engine, its sleep state, its counters and its faults, without the HTTP around them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from simulator.core.engine import Engine
from simulator.core.memory import OutOfMemory
from simulator.core.profile import Profile
from simulator.core.requests import EngineRequest, FinishedRequest, FinishReason, StepOutcome
from simulator.core.sleep import KV_CACHE, WEIGHTS, SleepState
from simulator.core.tokens import OutputPlan, Prompt, block_hashes, count_tokens
from simulator.server.driver import EngineDriver, TokenSink
from simulator.server.exposition import Page
from simulator.server.faults import SLOW_FACTOR, Fault
from simulator.server.http_metrics import HttpMetrics, ProcessMetrics
from simulator.server.openai_api import ApiError
from simulator.server.vllm_metrics import RequestParams, VllmMetrics

log = structlog.get_logger(__name__)

KV_HOLD_TIMEOUT_S = 480.0
"""vLLM's NIXL connector frees KV that no decode server fetched after this time."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSettings:
    """How one server is started."""

    name: str
    model_name: str
    profile: Profile
    stream_interval: int = 1
    time_scale: float = 1.0
    """Simulated seconds in one second of the wall clock, for the engine, KV transfers and sleep and wake."""
    bring_up_scale: float = 1.0
    """Part of the measured first-sleep time; it never makes a first sleep shorter than a later one."""

    def __post_init__(self) -> None:
        if self.stream_interval < 1:
            raise ValueError(f"stream_interval must be at least 1, not {self.stream_interval}")
        if self.time_scale <= 0 or self.bring_up_scale < 0:
            raise ValueError("time_scale must be positive and bring_up_scale not negative")


@dataclasses.dataclass(slots=True)
class ServerStats:
    """Counters of one server since its start."""

    requests_received: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    requests_received_while_asleep: int = 0
    requests_received_without_weights: int = 0
    """After a sleep of level 2 and before the weights were loaded again: a real server answers nonsense."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    aborted: int = 0
    aborted_by_sleep: int = 0
    """Of those, requests that a `/sleep?mode=abort` or a pause found in the engine or waiting for it."""

    def add(self, other: ServerStats) -> None:
        """Add another server's counters."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Surroundings(Protocol):
    """What a server needs of the machine it runs on."""

    def claim_memory(self, state: SleepState) -> OutOfMemory | None:
        """Claim the HBM that this sleep state needs, or return why it is not available."""

    def release_remote_kv(self, engine_id: str, request_id: str) -> None:
        """Notify a prefill server that its KV was fetched."""

    def has_remote_kv(self, engine_id: str, request_id: str) -> bool:
        """Whether that prefill server still holds the KV."""


class Standalone:
    """Surroundings of a single server: memory is never short, no KV comes from elsewhere."""

    def claim_memory(self, state: SleepState) -> OutOfMemory | None:
        """Grant everything."""
        return None

    def release_remote_kv(self, engine_id: str, request_id: str) -> None:
        """There is no other server."""

    def has_remote_kv(self, engine_id: str, request_id: str) -> bool:
        """There is no other server."""
        return False


class SimulatedServer:
    """The state of one server; the HTTP application calls it."""

    def __init__(
        self,
        settings: ServerSettings,
        surroundings: Surroundings | None = None,
        *,
        process_start_s: float | None = None,
    ) -> None:
        """`process_start_s` is when the process began to load, in unix time; None: now."""
        self.settings = settings
        profile = settings.profile
        self._surroundings = surroundings if surroundings is not None else Standalone()
        self.started_s = time.time()
        self.limits = profile.engine_limits()
        self._timing = profile.iteration_model().faster(settings.time_scale)
        self.link = profile.kv_link().faster(settings.time_scale)
        self.engine = Engine(self.limits, self._timing)
        self.stats = ServerStats()
        self.page = Page(self._refresh)
        self._process_metrics = ProcessMetrics(
            self.page, start_time_s=self.started_s if process_start_s is None else process_start_s
        )
        self.metrics = VllmMetrics(
            self.page,
            model_name=settings.model_name,
            engine="0",
            limits=self.limits,
            kv_cache_bytes=int(profile.memory.kv_cache_gib * 2**30),
            created_s=self.started_s,
        )
        self.http_metrics = HttpMetrics(self.page, created_s=self.started_s)
        self.driver = EngineDriver(self.engine, self)
        self.sleep_state = SleepState()
        self.has_weights = True
        self.metrics.record_sleep_state(self.sleep_state.gauges())
        self.fault = Fault.NONE
        self.fault_changed = asyncio.Event()
        self.load = 0
        self._params: dict[str, RequestParams] = {}
        self._operations = asyncio.Lock()
        self._hold_timers: dict[str, asyncio.TimerHandle] = {}
        self.wake_called_s: float | None = None
        """When `/wake_up` was called last, in unix time."""
        self.on_crash: Callable[[], None] = lambda: None

    # --- requests -------------------------------------------------------------------------------------------------

    def check_queue(self) -> None:
        """Raise ApiError 503 when the queue takes no more; before any header is sent."""
        limit = self.settings.profile.limits.max_num_queued_reqs
        if limit is not None and self.driver.unfinished - self.engine.num_running >= limit:
            self.metrics.record_rejection()
            message = (
                "The engine is currently busy and cannot accept new requests. Please try again later or on a "
                "different instance."
            )
            raise ApiError(503, message, "Service Unavailable")

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        plan: OutputPlan,
        params: RequestParams,
        *,
        sink: TokenSink | None = None,
        external_kv: tuple[str, str] | None = None,
        hold_kv: bool = False,
    ) -> asyncio.Future[FinishedRequest]:
        """Give a sequence to the engine.

        `external_kv` names the prefill server and request whose KV is fetched first; when that KV is gone, the prompt
        is computed here.
        """
        prompt_tokens = count_tokens(prompt)
        transfer_s = None
        if external_kv is not None and self._surroundings.has_remote_kv(*external_kv):
            transfer_s = self.link.transfer_s(prompt_tokens)
            loop = asyncio.get_running_loop()
            loop.call_later(transfer_s, self._surroundings.release_remote_kv, *external_kv)
        request = EngineRequest(
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            output_tokens=plan.output_tokens,
            finish_reason=plan.finish_reason,
            block_hashes=block_hashes(prompt, self.limits.block_size) if self.limits.enable_prefix_caching else (),
            external_kv_s=transfer_s,
            hold_kv=hold_kv,
        )
        done = self.driver.submit(request, sink)
        self._params[request_id] = params
        self.stats.requests_received += 1
        if not self.driver.admitting:
            # From the call of /sleep to the end of /wake_up: no request should be sent meanwhile.
            self.stats.requests_received_while_asleep += 1
            log.warning("a request came while asleep", replica=self.settings.name, request_id=request_id)
        if not self.has_weights:
            self.stats.requests_received_without_weights += 1
        return done

    def release_kv(self, request_id: str) -> None:
        """A decode server has fetched this request's KV, or never will."""
        timer = self._hold_timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        if self.engine.release_held(request_id):
            self.driver.kick()

    def holds_kv(self, request_id: str) -> bool:
        """Whether the KV of a finished request still waits to be fetched."""
        return self.engine.is_held(request_id)

    def step_ended(self, outcome: StepOutcome) -> None:
        """Record an iteration."""
        self.stats.generation_tokens += len(outcome.emitted)
        for first in outcome.first_tokens:
            self.stats.prompt_tokens += first.prompt_tokens
        self.metrics.record_step(outcome)
        self.metrics.record_counters(self.engine)
        self.metrics.record_gauges(self.engine)

    def request_finished(self, finished: FinishedRequest) -> None:
        """Record the end of a request."""
        request_id = finished.request.request_id
        params = self._params.pop(request_id, RequestParams(n=1, max_tokens=finished.request.output_tokens))
        if finished.reason is FinishReason.ABORT:
            self.stats.aborted += 1
        elif finished.reason is FinishReason.ERROR:
            self.stats.requests_failed += 1
        else:
            self.stats.requests_finished += 1
        if finished.request.hold_kv:
            loop = asyncio.get_running_loop()
            hold_s = KV_HOLD_TIMEOUT_S / self.settings.time_scale
            self._hold_timers[request_id] = loop.call_later(hold_s, self.release_kv, request_id)
        self.metrics.record_finished(finished, params)

    def scheduler_changed(self) -> None:
        """Record what the scheduler holds after an abort."""
        self.metrics.record_gauges(self.engine)

    # --- sleep, wake, pause ---------------------------------------------------------------------------------------

    async def sleep(self, level: int, mode: str) -> None:
        """Fall asleep; returns when asleep. Concurrent operations wait for one another."""
        async with self._operations:
            started_s = self.driver.now_s()
            self.metrics.sleep_operation_started("sleep")
            await self._quiesce(mode)
            before = self.sleep_state
            self.sleep_state = before.pause()
            if level > 0 and not before.offloaded:
                await asyncio.sleep(self._sleep_s(level, before))
            if level > 0:
                self.engine.reset_cache()
            self.sleep_state = before.sleep(level)
            # A server that sleeps already discards nothing, whatever level it then shows.
            self.has_weights = self.has_weights and (level < 2 or before.offloaded)
            self._surroundings.claim_memory(self.sleep_state)
            self.metrics.record_sleep_state(self.sleep_state.gauges())
            self.metrics.sleep_operation_ended("sleep", self.driver.now_s() - started_s, time.time())

    async def wake(self, tags: tuple[str, ...] | None) -> None:
        """Wake up, wholly or by memory tags; raises ApiError 500 when there is not enough memory."""
        self.wake_called_s = time.time()
        async with self._operations:
            started_s = self.driver.now_s()
            self.metrics.sleep_operation_started("wake")
            try:
                await self._wake(tags)
            finally:
                self.metrics.sleep_operation_ended("wake", self.driver.now_s() - started_s, time.time())

    async def _wake(self, tags: tuple[str, ...] | None) -> None:
        if self.fault is Fault.WAKE_REFUSED:
            raise _worker_failed("wake_up", "CUDA error: an illegal memory access was encountered")
        target = self.sleep_state.wake(tags)
        short = self._surroundings.claim_memory(target)
        if short is not None:
            raise _worker_failed("wake_up", str(short))
        if WEIGHTS in self.sleep_state.missing - target.missing and self.has_weights:
            await asyncio.sleep(self.settings.profile.lifecycle.wake_s / self.settings.time_scale)
        self.sleep_state = target
        self.metrics.record_sleep_state(target.gauges())
        if target.runnable:
            self.driver.resume()

    async def pause(self, mode: str) -> None:
        """Stop the scheduler and keep all memory."""
        async with self._operations:
            await self._quiesce(mode)
            self.sleep_state = self.sleep_state.pause()

    async def resume(self) -> None:
        """Start the scheduler; a server that has given memory up stays asleep."""
        async with self._operations:
            self.sleep_state = self.sleep_state.resume()
            self.metrics.record_sleep_state(self.sleep_state.gauges())
            if self.sleep_state.runnable:
                self.driver.resume()

    async def reload_weights(self) -> None:
        """Load the model in place; its memory must be back. This is what takes long in a wake from level 2.

        Raises `ApiError` while it is not.
        """
        async with self._operations:
            if WEIGHTS in self.sleep_state.missing:
                raise _worker_failed("reload_weights", "CUDA error: an illegal memory access was encountered")
            await asyncio.sleep(self.settings.profile.lifecycle.wake_level2_s / self.settings.time_scale)
            self.has_weights = True

    def reset_prefix_cache(self, *, running_too: bool = False) -> bool:
        """Forget reusable blocks, unless some are held; `running_too` makes running requests give theirs back."""
        if self.engine.pool.used_blocks and not running_too:
            return False
        self.engine.pool.drop_idle()
        return True

    async def _quiesce(self, mode: str) -> None:
        self.driver.stop_admitting()
        if mode == "abort":
            self.stats.aborted_by_sleep += self.driver.abort_all()
        elif mode == "wait" and self.sleep_state.runnable:
            await self.driver.engine_idle()
        self.driver.stop_stepping()

    def _sleep_s(self, level: int, before: SleepState) -> float:
        lifecycle = self.settings.profile.lifecycle
        if level == 2:
            seconds = lifecycle.sleep_level2_s
        elif before.slept_before:
            seconds = lifecycle.sleep_s
        else:
            seconds = max(lifecycle.sleep_s, lifecycle.first_sleep_s * self.settings.bring_up_scale)
        return seconds / self.settings.time_scale

    # --- faults ---------------------------------------------------------------------------------------------------

    def set_fault(self, fault: Fault) -> None:
        """Put a fault in place of the one before; `none` heals."""
        self.fault = fault
        self.engine.timing = self._timing.faster(1 / SLOW_FACTOR) if fault is Fault.SLOW else self._timing
        self.driver.set_frozen(fault.stops_engine)
        changed, self.fault_changed = self.fault_changed, asyncio.Event()
        changed.set()
        if fault is Fault.CRASH:
            self.on_crash()

    def close(self) -> None:
        """Stop everything at once, as the end of the process does."""
        self.driver.close()
        for timer in self._hold_timers.values():
            timer.cancel()

    def awake_memory_gib(self, state: SleepState) -> float:
        """HBM per GPU in a sleep state."""
        memory = self.settings.profile.memory
        if not state.missing:
            return memory.awake_gib
        held = memory.sleeper_gib
        held += 0.0 if WEIGHTS in state.missing else memory.weights_gib
        return held + (0.0 if KV_CACHE in state.missing else memory.kv_cache_gib)

    def _refresh(self) -> None:
        self._process_metrics.refresh()


def _worker_failed(method: str, cause: str) -> ApiError:
    message = (
        f"Call to {method} method failed: Worker failed with error '{cause}', please check the stack trace above for "
        "the root cause"
    )
    return ApiError(500, message, "InternalServerError")
