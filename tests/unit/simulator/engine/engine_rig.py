"""Drives the stepping and the event engine with the same workload and writes down the same things about both."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from simulator.core.engine import Engine
from simulator.core.event_engine import EventEngine
from simulator.core.limits import EngineLimits
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.core.timing import IterationModel


@dataclasses.dataclass(frozen=True)
class Action:
    """Something from outside: a request, an abort, a fetch of held KV, or a look."""

    at_s: float
    submit: EngineRequest | None = None
    abort: str | None = None
    fetch: str | None = None


@dataclasses.dataclass
class Story:
    """What happened, in the same words for both engines."""

    finished: list[FinishedRequest] = dataclasses.field(default_factory=list)
    tokens: list[tuple[float, tuple[str, ...]]] = dataclasses.field(default_factory=list)
    """Per iteration: its end and who got a token, sorted by id."""
    seen: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    """At every action, before it: running, waiting, deferred, used blocks, idle blocks, preemptions."""
    final: tuple[object, ...] = ()

    def token_times(self) -> dict[str, list[float]]:
        """When each request's tokens came."""
        times: dict[str, list[float]] = {}
        for end_s, names in self.tokens:
            for name in names:
                times.setdefault(name, []).append(end_s)
        return times


class LoggedJumps(EventEngine):
    """An event engine that also says, iteration by iteration, what its runs stood for."""

    def __init__(self, limits: EngineLimits, timing: IterationModel) -> None:
        super().__init__(limits, timing)
        self.log: list[tuple[float, list[str]]] = []
        self.jumps = 0

    def _book(self, steps: int, end_s: float) -> None:
        names = [s.request.request_id for s in self._running if s.decoding]
        start_s, kv_tokens = self._run_start_s, self._batch.kv_tokens(self.counters.steps)
        curve = self._curves.of(max(1, self._batch.count))
        ends_s = [start_s + curve.total_s(kv_tokens, n) for n in range(1, steps)]
        self.log.extend((s, list(names)) for s in [*ends_s, end_s])
        self.jumps += 1
        super()._book(steps, end_s)

    def _end_chunk(self, sequence, tokens, now_s):  # type: ignore[no-untyped-def]
        super()._end_chunk(sequence, tokens, now_s)
        if sequence.decoding:
            self.log[-1][1].append(sequence.request.request_id)


def _final(engine: Engine | EventEngine) -> tuple[object, ...]:
    pool = engine.pool
    return (engine.unfinished, engine.held_requests, pool.used_blocks, list(pool._idle), engine.counters)


def _look(engine: Engine | EventEngine) -> tuple[int, ...]:
    pool = engine.pool
    return (
        engine.num_running,
        engine.num_waiting,
        engine.num_deferred,
        pool.used_blocks,
        pool.idle_blocks,
        engine.counters.preemptions,
    )


def step_through(limits: EngineLimits, timing: IterationModel, actions: Sequence[Action], max_steps: int) -> Story:
    """The stepping engine's story; what happens outside at the end of an iteration happens before that end."""
    engine, story = Engine(limits, timing), Story()
    end_s: float | None = None
    kick_s: float | None = None
    following = 0
    while len(story.tokens) < max_steps:
        deferred_s = engine.next_deferred_s()
        due_s = end_s if end_s is not None else min(t for t in (kick_s, deferred_s, math.inf) if t is not None)
        action_s = actions[following].at_s if following < len(actions) else math.inf
        if due_s == action_s == math.inf:
            break
        if action_s <= due_s:
            action = actions[following]
            following += 1
            story.seen.append(_look(engine))
            changed = _apply(action, engine.submit, engine.abort, lambda name, _: engine.release_held(name), story)
            kick_s = action_s if changed and end_s is None else kick_s
            continue
        if end_s is not None:
            outcome = engine.end_step()
            story.tokens.append((outcome.ended_s, tuple(sorted(outcome.emitted))))
            story.finished.extend(outcome.finished)
        end_s, kick_s = engine.begin_step(due_s), None
    story.final = _final(engine)
    return story


def jump_through(limits: EngineLimits, timing: IterationModel, actions: Sequence[Action]) -> tuple[Story, int]:
    """The event engine's story, and in how many runs it was told."""
    engine, story = LoggedJumps(limits, timing), Story()
    for action in actions:
        while engine.next_s < action.at_s:
            story.finished.extend(engine.fire())
        engine.observe(action.at_s)
        story.seen.append(_look(engine))
        _apply(action, engine.submit, engine.abort, engine.release_held, story)
    while engine.next_s < math.inf:
        story.finished.extend(engine.fire())
    story.tokens = [(end_s, tuple(sorted(names))) for end_s, names in engine.log]
    story.final = _final(engine)
    return story, engine.jumps


def _apply(
    action: Action,
    submit: Callable[[EngineRequest, float], None],
    abort: Callable[[str, float], FinishedRequest | None],
    fetch: Callable[[str, float], bool],
    story: Story,
) -> bool:
    """Do it; whether anything changed by it."""
    if action.submit is not None:
        submit(action.submit, action.at_s)
        return True
    if action.abort is not None:
        ended = abort(action.abort, action.at_s)
        if ended is not None:
            story.finished.append(ended)
        return ended is not None
    return action.fetch is not None and fetch(action.fetch, action.at_s)
