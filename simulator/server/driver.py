"""Runs one engine on the event loop's clock.

The end of an iteration is a timer; the next one starts where the last ended, not when the timer fired, so a busy loop
makes iterations late but not longer. When the loop is later than `MAX_DEBT_S`, the debt is forgotten: the simulated
GPU then was idle for that time. Requests that come while the engine may not take any wait in a backlog.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Protocol

from simulator.core.engine import Engine
from simulator.core.requests import EngineRequest, FinishedRequest, FinishReason, StepOutcome

MAX_DEBT_S = 1.0


class TokenSink(Protocol):
    """Receives every token of a request that is streamed."""

    def token(self) -> None:
        """One token was emitted."""


class Recorder(Protocol):
    """Writes down what happens in the engine."""

    def step_ended(self, outcome: StepOutcome) -> None:
        """An iteration ended."""

    def request_finished(self, finished: FinishedRequest) -> None:
        """Called when a request ended, for any reason, before its client gets the end."""

    def scheduler_changed(self) -> None:
        """Queue or batch changed outside an iteration."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Ticket:
    done: asyncio.Future[FinishedRequest]
    sink: TokenSink | None


class EngineDriver:
    """Feeds an engine and passes its tokens to clients."""

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine = engine
        self._recorder = recorder
        self._tickets: dict[str, _Ticket] = {}
        self._sinks: dict[str, TokenSink] = {}
        self._backlog: dict[str, tuple[EngineRequest, float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wake_timer: asyncio.TimerHandle | None = None
        self._admitting = True
        self._stepping = True
        self._frozen = False
        self._overdue = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.lag_s = 0.0

    def now_s(self) -> float:
        """The driver's clock."""
        return self._loop.time()

    @property
    def admitting(self) -> bool:
        """Whether requests go to the engine; else they wait in the backlog."""
        return self._admitting

    @property
    def unfinished(self) -> int:
        """Requests in the engine and in the backlog."""
        return self.engine.unfinished + len(self._backlog)

    def submit(self, request: EngineRequest, sink: TokenSink | None = None) -> asyncio.Future[FinishedRequest]:
        """Queue a request; the future ends with it, also when it is aborted. Raises ValueError as the engine does."""
        if request.request_id in self._tickets:
            raise ValueError(f"request id {request.request_id!r} is in use")
        now_s = self.now_s()
        if self._admitting:
            self.engine.submit(request, now_s)
        else:
            self._backlog[request.request_id] = (request, now_s)
        self._idle.clear()
        ticket = _Ticket(self._loop.create_future(), sink)
        self._tickets[request.request_id] = ticket
        if sink is not None:
            self._sinks[request.request_id] = sink
        self._kick(now_s)
        return ticket.done

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request now, wherever it is; nothing happens when it has ended already."""
        now_s = self.now_s()
        waiting = self._backlog.pop(request_id, None)
        if waiting is not None:
            self._finish(_never_started(waiting[0], waiting[1], reason, now_s))
            return
        finished = self.engine.abort(request_id, now_s, reason)
        if finished is not None:
            self._finish(finished)
            if self._stepping:
                self._recorder.scheduler_changed()
            self._kick(now_s)

    def abort_all(self) -> int:
        """End every request and return their number."""
        now_s = self.now_s()
        finished = list(self.engine.abort_all(now_s))
        finished += [_never_started(r, at_s, FinishReason.ABORT, now_s) for r, at_s in self._backlog.values()]
        self._backlog.clear()
        for one in finished:
            self._finish(one)
        self._recorder.scheduler_changed()
        return len(finished)

    def stop_admitting(self) -> None:
        """Leave what comes from now on in the backlog; what is in the engine runs on."""
        self._admitting = False

    def stop_stepping(self) -> None:
        """Start no further iteration."""
        self._stepping = False

    def resume(self) -> None:
        """Admit the backlog, with its true arrival times, and run."""
        self._admitting = True
        self._stepping = True
        for request, arrival_s in self._backlog.values():
            self.engine.submit(request, arrival_s)
        self._backlog.clear()
        self._kick(self.now_s())

    async def engine_idle(self) -> None:
        """Wait until the engine has nothing left; the backlog may still hold requests."""
        while self.engine.unfinished:
            self._idle.clear()
            await self._idle.wait()

    def set_frozen(self, frozen: bool) -> None:
        """Stall the engine, iteration under way included, or let it go on."""
        self._frozen = frozen
        if frozen:
            return
        if self._overdue:
            self._end_step(self.now_s())
        self._kick(self.now_s())

    def kick(self) -> None:
        """Look whether an iteration can start; for changes the driver cannot see."""
        self._kick(self.now_s())

    def close(self) -> None:
        """Stop the timers and drop what is left; futures end cancelled."""
        self._stepping = False
        for timer in (self._timer, self._wake_timer):
            if timer is not None:
                timer.cancel()
        for ticket in self._tickets.values():
            ticket.done.cancel()
        self._tickets.clear()
        self._sinks.clear()

    def _kick(self, start_s: float) -> None:
        if not self._stepping or self._frozen or self.engine.in_step:
            return
        end_s = self.engine.begin_step(start_s)
        if end_s is not None:
            self._timer = self._loop.call_at(end_s, self._step_due)
            return
        self._wait_for_kv()

    def _wait_for_kv(self) -> None:
        ready_s = self.engine.next_deferred_s()
        if self._wake_timer is not None:
            self._wake_timer.cancel()
            self._wake_timer = None
        if ready_s is not None:
            # A millisecond later than due: timers may fire a little early.
            self._wake_timer = self._loop.call_at(ready_s + 0.001, self.kick)

    def _step_due(self) -> None:
        if self._frozen:
            self._overdue = True
        else:
            self._end_step(None)

    def _end_step(self, ended_s: float | None) -> None:
        """End the iteration at its planned time, or later at `ended_s`, after a stall."""
        self._overdue = False
        outcome = self.engine.end_step(ended_s)
        self.lag_s = self.now_s() - outcome.ended_s
        sinks = self._sinks
        if sinks:
            for request_id in outcome.emitted:
                sink = sinks.get(request_id)
                if sink is not None:
                    sink.token()
        self._recorder.step_ended(outcome)
        for finished in outcome.finished:
            self._finish(finished)
        if not self.engine.unfinished:
            self._idle.set()
        self._kick(outcome.ended_s if self.lag_s < MAX_DEBT_S else self.now_s())

    def _finish(self, finished: FinishedRequest) -> None:
        request_id = finished.request.request_id
        self._recorder.request_finished(finished)
        self._sinks.pop(request_id, None)
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None and not ticket.done.done():
            ticket.done.set_result(finished)
        if not self.engine.unfinished:
            self._idle.set()


def _never_started(request: EngineRequest, arrival_s: float, reason: FinishReason, now_s: float) -> FinishedRequest:
    return FinishedRequest(
        request=request,
        reason=reason,
        generated_tokens=0,
        cached_tokens=0,
        external_tokens=0,
        arrival_s=arrival_s,
        scheduled_s=None,
        first_token_s=None,
        last_token_s=None,
        finished_s=now_s,
        preemptions=0,
    )
