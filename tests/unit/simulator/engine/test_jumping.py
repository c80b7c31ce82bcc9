"""The event engine tells the same story as the stepping one, in fewer words."""

import dataclasses
import math

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from simulator.core.curves import DecodeCurve, DecodeCurves
from simulator.core.event_engine import EventEngine
from simulator.core.limits import EngineLimits
from simulator.core.requests import EngineRequest, FinishedRequest, FinishReason
from simulator.core.timing import BatchWork, IterationModel
from simulator.profiles import packaged_profiles
from tests.support.properties import costly
from tests.unit.simulator.engine.engine_rig import Action, Story, jump_through, step_through

DYADIC = IterationModel(
    host_s=0.125,
    weights_s=1.0,
    linear_s=0.25,
    token_s=0.0625,
    seq_s=1 / 128,
    kv_token_s=1 / 1024,
    attention_pair_s=1 / 4096,
)
"""Every sum of these is exact, so that ties between arrivals and ends of iterations are the same for both engines."""
UNIT = IterationModel(
    host_s=0.0, weights_s=1.0, linear_s=0.0, token_s=0.0, seq_s=0.0, kv_token_s=0.0, attention_pair_s=0.0
)


@dataclasses.dataclass(frozen=True)
class Load:
    prompt: int
    output: int
    gap_s: float
    prefix: int
    external_s: float | None
    hold: bool
    abort_after_s: float | None


def loads(gaps_s: st.SearchStrategy[float], *, prompts: int, outputs: int) -> st.SearchStrategy[list[Load]]:
    return st.lists(
        st.builds(
            Load,
            prompt=st.integers(1, prompts),
            output=st.integers(1, outputs),
            gap_s=gaps_s,
            prefix=st.integers(0, 3),
            external_s=st.none() | st.none() | st.sampled_from([0.0, 1.5, 4.25]),
            hold=st.sampled_from([False, False, False, True]),
            abort_after_s=st.none() | st.none() | st.none() | st.sampled_from([0.0, 2.5, 7.0, 20.0]),
        ),
        min_size=1,
        max_size=20,
    )


def actions_of(chosen: list[Load], block_size: int) -> list[Action]:
    """Arrivals, aborts, and a fetch of every held KV long after it can have been computed."""
    actions, at_s = [], 0.0
    for index, load in enumerate(chosen):
        at_s += load.gap_s
        name = f"r{index}"
        hashes = tuple(1000 * load.prefix + i for i in range(load.prompt // block_size)) if load.prefix else ()
        request = EngineRequest(
            name,
            load.prompt,
            load.output,
            block_hashes=hashes,
            external_kv_s=load.external_s,
            hold_kv=load.hold,
        )
        actions.append(Action(at_s, submit=request))
        if load.abort_after_s is not None:
            actions.append(Action(at_s + load.abort_after_s, abort=name))
        if load.hold:
            actions.extend(Action(at_s + later_s, fetch=name) for later_s in (6.0, 40.0, 100.0, 3000.0))
    return sorted(actions, key=lambda action: action.at_s)


def check_same(stepped: Story, jumped: Story, tolerance: float) -> None:
    assert [f.request.request_id for f in jumped.finished] == [f.request.request_id for f in stepped.finished]
    assert jumped.seen == stepped.seen
    assert jumped.final == stepped.final
    assert [names for _, names in jumped.tokens] == [names for _, names in stepped.tokens]
    ends_s = [end_s for end_s, _ in stepped.tokens]
    assert [end_s for end_s, _ in jumped.tokens] == (pytest.approx(ends_s, rel=tolerance) if tolerance else ends_s)
    for ours, theirs in zip(jumped.finished, stepped.finished, strict=True):
        for field in dataclasses.fields(FinishedRequest):
            value, expected = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(expected, float) and tolerance:
                assert value == pytest.approx(expected, rel=tolerance), field.name
            else:
                assert value == expected, field.name


@costly(max_examples=400)
@given(
    loads(st.sampled_from([0.0, 0.0, 0.5, 1.125, 3.0, 11.0]), prompts=40, outputs=24),
    st.integers(1, 5),
    st.integers(1, 24),
    st.integers(1, 5),
    st.integers(64, 160),
    st.booleans(),
    st.sampled_from([DYADIC, UNIT]),
)
def test_both_engines_tell_the_same_story(
    chosen: list[Load],
    max_num_seqs: int,
    budget: int,
    block_size: int,
    capacity: int,
    caching: bool,
    timing: IterationModel,
) -> None:
    limits = EngineLimits(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        num_gpu_blocks=-(-capacity // block_size),
        max_model_len=64,
        enable_prefix_caching=caching,
    )
    actions = actions_of(chosen, block_size)
    stepped = step_through(limits, timing, actions, max_steps=20_000)
    jumped, runs = jump_through(limits, timing, actions)
    check_same(stepped, jumped, 0.0)
    assert len(jumped.finished) == len(stepped.finished)
    event(f"preempted: {'yes' if any(f.preemptions for f in stepped.finished) else 'no'}")
    event(f"jumped: {'yes' if runs < len(stepped.tokens) else 'no'}")


@settings(max_examples=60, deadline=None)
@given(
    loads(st.floats(0.0, 0.7), prompts=3000, outputs=400),
    st.sampled_from(["h100-8b-tp1", "a100-8b-tp1", "h100-70b-tp4"]),
    st.integers(1, 16),
    st.sampled_from([256, 2048, 8192]),
    st.integers(4000, 24_000),
)
def test_with_measured_profiles_token_times_agree_to_one_part_in_a_billion(
    chosen: list[Load], profile: str, max_num_seqs: int, budget: int, capacity: int
) -> None:
    loaded = packaged_profiles()[profile]
    limits = EngineLimits(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        block_size=16,
        num_gpu_blocks=capacity // 16,
        max_model_len=3400,
    )
    timing = loaded.iteration_model()
    actions = actions_of(chosen, 16)
    stepped = step_through(limits, timing, actions, max_steps=50_000)
    jumped, _ = jump_through(limits, timing, actions)
    check_same(stepped, jumped, 1e-9)
    assert len(jumped.finished) == len(stepped.finished)


def test_a_head_of_the_queue_that_does_not_fit_whole_waits_however_much_of_it_is_evicted() -> None:
    """The blocks of the waiting prompt go one by one; its first chunk would fit all the time."""
    limits = EngineLimits(max_num_batched_tokens=8, max_num_seqs=4, block_size=4, num_gpu_blocks=12, max_model_len=48)
    prefix = tuple(range(11, 20))
    actions = [
        Action(0.0, submit=EngineRequest("a", 4, 1, block_hashes=prefix[:1])),
        Action(0.0, submit=EngineRequest("b", 36, 1, block_hashes=prefix)),
        Action(6.0, submit=EngineRequest("d", 9, 30)),
        Action(9.5, submit=EngineRequest("h", 40, 1, block_hashes=prefix)),
    ]
    stepped = step_through(limits, UNIT, actions, max_steps=1000)
    jumped, _ = jump_through(limits, UNIT, actions)
    check_same(stepped, jumped, 0.0)
    d, h = jumped.finished[2:]
    assert h.scheduled_s is not None
    assert h.scheduled_s == d.finished_s
    assert h.cached_tokens < 36, "some of the prefix was evicted"


def test_a_run_costs_one_event_however_long_it_is() -> None:
    limits = EngineLimits(
        max_num_batched_tokens=64, max_num_seqs=4, block_size=16, num_gpu_blocks=10_000, max_model_len=100_000
    )
    engine = EventEngine(limits, UNIT)
    engine.submit(EngineRequest("a", 16, 50_000), 0.0)
    fired = 0
    finished: list[FinishedRequest] = []
    while engine.unfinished:
        finished += engine.fire()
        fired += 1
    assert fired == 3, "the start, the end of the prefill, the end"
    assert finished[0].finished_s == 50_000.0
    assert engine.counters.steps == 50_000


def test_a_look_in_the_middle_of_a_run_shows_what_the_stepping_engine_holds() -> None:
    engine = EventEngine(
        EngineLimits(max_num_batched_tokens=8, max_num_seqs=2, block_size=4, num_gpu_blocks=100, max_model_len=64),
        UNIT,
    )
    engine.submit(EngineRequest("a", 4, 20), 1.0)
    engine.advance(6.5)
    gauges = engine.observe(6.5)
    # Prefill from 1 to 2; four decoding iterations until 6, the fifth is under way and has its block.
    assert (gauges.running, gauges.steps, gauges.generated_tokens, gauges.used_blocks) == (1, 5, 5, 3)
    assert gauges.busy_s == 5.5
    assert gauges.computed_tokens == 8
    engine.advance(100.0)
    assert engine.observe(100.0).busy_s == 20.0


def test_the_end_of_the_iteration_under_way_is_known_in_the_middle_of_a_run() -> None:
    limits = EngineLimits(max_num_batched_tokens=64, max_num_seqs=4, block_size=4, num_gpu_blocks=64, max_model_len=64)
    engine = EventEngine(limits, UNIT)
    assert engine.iteration_end_s(0.0) == math.inf
    engine.submit(EngineRequest("a", 4, 12), 0.0)
    engine.advance(0.0)
    assert engine.iteration_end_s(0.5) == 1.0
    engine.advance(1.0)
    assert [engine.iteration_end_s(at_s) for at_s in (1.5, 4.25, 11.75)] == [2.0, 5.0, 12.0]
    assert [one.finished_s for one in engine.advance(20.0)] == [12.0]


def test_a_stopped_engine_begins_nothing_and_goes_on_where_it_was() -> None:
    engine = EventEngine(
        EngineLimits(max_num_batched_tokens=8, max_num_seqs=2, block_size=4, num_gpu_blocks=100, max_model_len=64),
        UNIT,
    )
    engine.submit(EngineRequest("a", 4, 6), 0.0)
    engine.advance(2.5)
    engine.stop(2.5)
    assert engine.advance(50.0) == []
    assert engine.observe(50.0).generated_tokens == 3
    engine.submit(EngineRequest("b", 4, 1), 55.0)
    engine.resume(60.0)
    finished = engine.advance(100.0)
    assert [(f.request.request_id, f.finished_s) for f in finished] == [("b", 61.0), ("a", 63.0)]


def test_an_abort_in_a_run_keeps_the_tokens_of_the_iterations_that_ended() -> None:
    engine = EventEngine(
        EngineLimits(max_num_batched_tokens=8, max_num_seqs=2, block_size=4, num_gpu_blocks=100, max_model_len=64),
        UNIT,
    )
    engine.submit(EngineRequest("a", 4, 20), 0.0)
    engine.advance(5.5)
    aborted = engine.abort("a", 5.5)
    assert aborted is not None
    assert (aborted.reason, aborted.generated_tokens, aborted.last_token_s) == (FinishReason.ABORT, 5, 5.0)
    assert engine.pool.used_blocks == 0
    assert engine.abort("a", 5.5) is None


@dataclasses.dataclass(frozen=True, slots=True)
class _Kneed(IterationModel):
    """Reading the KV cache is free up to a knee that no power of two meets."""

    def iteration_s(self, work: BatchWork) -> float:
        return 1.0 + max(0.25, work.kv_tokens / 1024)


@dataclasses.dataclass(frozen=True, slots=True)
class _Curved(IterationModel):
    """Nothing of this is linear."""

    def iteration_s(self, work: BatchWork) -> float:
        return float(1 + work.kv_tokens**0.5)


_ZEROS = {field.name: 0.0 for field in dataclasses.fields(IterationModel)} | {"host_s": 1.0}


@given(st.integers(0, 3000), st.integers(1, 7), st.integers(1, 400), st.floats(0.0, 2000.0))
def test_sums_and_their_inverse_follow_a_model_with_a_knee(kv: int, seqs: int, steps: int, seconds: float) -> None:
    timing = _Kneed(**_ZEROS)
    curve = DecodeCurve(timing, seqs, 4096)
    totals = [0.0]
    for n in range(steps):
        totals.append(totals[-1] + timing.iteration_s(BatchWork(0, seqs, kv + n * seqs, 0.0)))
    assert curve.total_s(kv, steps) == pytest.approx(totals[-1], rel=1e-12)
    expected = next((n for n in range(1, steps + 1) if totals[n] >= seconds), steps)
    assert curve.steps_until(kv, seconds, steps) == expected


def test_a_model_that_is_not_piecewise_linear_in_kv_is_refused() -> None:
    with pytest.raises(ValueError, match="not piecewise linear"):
        DecodeCurve(_Curved(**_ZEROS), 1, 4096)


def test_curves_of_another_model_are_refused() -> None:
    limits = EngineLimits(max_num_batched_tokens=8, max_num_seqs=2, block_size=4, num_gpu_blocks=100, max_model_len=64)
    with pytest.raises(ValueError, match="another iteration model"):
        EventEngine(limits, UNIT, DecodeCurves(DYADIC, 400))


def test_an_idle_engine_has_nothing_to_fire() -> None:
    limits = EngineLimits(max_num_batched_tokens=8, max_num_seqs=2, block_size=4, num_gpu_blocks=100, max_model_len=64)
    with pytest.raises(ValueError, match="nothing is to happen"):
        EventEngine(limits, UNIT).fire()
