"""Continuous batching: golden cases by hand, conservation by Hypothesis."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.core.engine import Engine
from simulator.core.limits import EngineLimits
from simulator.core.requests import EngineRequest, FinishedRequest, FinishReason
from simulator.core.timing import BatchWork, IterationModel, KvLink

LIMITS = EngineLimits(max_num_batched_tokens=8, max_num_seqs=2, block_size=4, num_gpu_blocks=100, max_model_len=64)
UNIT = IterationModel(
    host_s=0.0, weights_s=1.0, linear_s=0.0, token_s=0.0, seq_s=0.0, kv_token_s=0.0, attention_pair_s=0.0
)
"""Every iteration takes one second."""


def request(name: str, prompt: int, output: int, **more: object) -> EngineRequest:
    return dataclasses.replace(EngineRequest(name, prompt, output), **more)  # type: ignore[arg-type]


def run_until_idle(
    engine: Engine, now_s: float = 0.0
) -> tuple[list[tuple[float, tuple[str, ...]]], list[FinishedRequest]]:
    """Steps until nothing is left; (end of step, who got a token) per step, and what finished."""
    steps, finished = [], []
    while engine.unfinished:
        ended_s = engine.begin_step(now_s)
        if ended_s is None:
            deferred_s = engine.next_deferred_s()
            assert deferred_s is not None, "the engine is stuck"
            now_s = deferred_s
            continue
        outcome = engine.end_step()
        steps.append((outcome.ended_s, outcome.emitted))
        finished.extend(outcome.finished)
        now_s = ended_s
    return steps, finished


def test_a_long_prompt_is_prefilled_in_chunks_of_the_token_budget() -> None:
    engine = Engine(LIMITS, UNIT)
    engine.submit(request("a", 20, 2), 0.0)
    steps, finished = run_until_idle(engine)
    assert steps == [(1.0, ()), (2.0, ()), (3.0, ("a",)), (4.0, ("a",))]
    assert finished[0].first_token_s == 3.0
    assert finished[0].reason is FinishReason.LENGTH


def test_decoding_goes_before_prefilling_within_the_budget() -> None:
    engine = Engine(LIMITS, UNIT)
    engine.submit(request("a", 4, 10), 0.0)
    engine.begin_step(0.0)
    engine.end_step()
    engine.submit(request("b", 14, 1), 1.0)
    engine.begin_step(1.0)
    first = engine.end_step()
    assert first.emitted == ("a",)
    assert first.batch_tokens == 8
    engine.begin_step(2.0)
    second = engine.end_step()
    assert second.emitted == ("a", "b")
    assert second.batch_tokens == 8


def test_waiting_requests_are_admitted_first_come_first_served_up_to_max_num_seqs() -> None:
    engine = Engine(LIMITS, UNIT)
    for name in ("a", "b", "c"):
        engine.submit(request(name, 2, 2), 0.0)
    engine.begin_step(0.0)
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    engine.end_step()
    _, finished = run_until_idle(engine, 1.0)
    assert [f.request.request_id for f in finished] == ["a", "b", "c"]
    assert finished[2].scheduled_s == 2.0


def test_the_latest_admitted_sequence_is_preempted_and_recomputed_without_losing_tokens() -> None:
    limits = dataclasses.replace(LIMITS, num_gpu_blocks=4, max_model_len=16)
    engine = Engine(limits, UNIT)
    engine.submit(request("a", 4, 8), 0.0)
    engine.submit(request("b", 4, 8), 0.0)
    steps, finished = run_until_idle(engine)
    emitted = [name for _, names in steps for name in names]
    assert (emitted.count("a"), emitted.count("b")) == (8, 8)
    assert {f.request.request_id: f.preemptions for f in finished} == {"a": 0, "b": 1}
    assert engine.counters.preemptions == 1
    assert engine.pool.used_blocks == 0


def test_a_preempted_request_goes_before_those_that_wait() -> None:
    limits = dataclasses.replace(LIMITS, num_gpu_blocks=4, max_model_len=16)
    engine = Engine(limits, UNIT)
    for name in ("a", "b", "c"):
        engine.submit(request(name, 4, 8), 0.0)
    now_s = 0.0
    while not engine.counters.preemptions:
        now_s = engine.begin_step(now_s) or now_s
        engine.end_step()
    engine.abort("a", now_s)
    # b, with its prompt and five tokens to compute again, takes the whole budget of the next iteration.
    engine.begin_step(now_s)
    assert engine.end_step().emitted == ()
    engine.begin_step(now_s)
    assert engine.end_step().emitted == ("b", "c")


def test_a_prompt_that_does_not_fit_whole_is_not_begun_though_its_first_chunk_would_fit() -> None:
    limits = dataclasses.replace(LIMITS, num_gpu_blocks=6, max_model_len=24)
    engine = Engine(limits, UNIT)
    engine.submit(request("a", 8, 6), 0.0)
    engine.submit(request("long", 16, 1), 0.0)
    engine.submit(request("short", 4, 1), 0.0)
    _, finished = run_until_idle(engine)
    # It waits for the end of `a`, and nobody goes before it.
    assert [(f.request.request_id, f.scheduled_s) for f in finished] == [("a", 0.0), ("long", 6.0), ("short", 8.0)]
    assert engine.counters.preemptions == 0


@pytest.mark.parametrize(("caching", "computed_again"), [(True, 1), (False, 8)])
def test_a_preempted_request_finds_its_blocks_again_generated_ones_too(caching: bool, computed_again: int) -> None:
    limits = dataclasses.replace(LIMITS, num_gpu_blocks=5, max_model_len=16, enable_prefix_caching=caching)
    engine = Engine(limits, UNIT)
    engine.submit(request("a", 4, 8, block_hashes=(1,)), 0.0)
    engine.submit(request("b", 4, 8, block_hashes=(2,)), 0.0)
    now_s = 0.0
    while not engine.counters.preemptions:
        now_s = engine.begin_step(now_s) or now_s
        engine.end_step()
    # `a` took the last free block; of the nine tokens of `b` eight had been computed, four of them generated ones.
    engine.abort("a", now_s)
    engine.begin_step(now_s)
    assert engine.end_step().batch_tokens == computed_again


def test_a_shared_prefix_is_computed_once_and_the_last_token_always() -> None:
    engine = Engine(LIMITS, UNIT)
    engine.submit(request("a", 8, 1, block_hashes=(11, 12)), 0.0)
    run_until_idle(engine)
    engine.submit(request("b", 8, 1, block_hashes=(11, 12)), 5.0)
    engine.submit(request("c", 12, 1, block_hashes=(11, 12, 13)), 5.0)
    _, finished = run_until_idle(engine, 5.0)
    assert [f.cached_tokens for f in finished] == [4, 8]
    assert engine.counters.prefix_queries_tokens == 28
    assert engine.counters.prefix_hits_tokens == 12


def test_kv_from_a_prefill_server_leaves_one_token_to_compute() -> None:
    link = KvLink(latency_s=0.5, bytes_per_s=100.0, kv_bytes_per_token=5.0)
    engine = Engine(LIMITS, UNIT)
    engine.submit(request("a", 30, 2, external_kv_s=link.transfer_s(30)), 0.0)
    assert engine.begin_step(0.0) is None
    assert (engine.num_deferred, engine.next_deferred_s()) == (1, 2.0)
    steps, finished = run_until_idle(engine)
    assert steps == [(3.0, ("a",)), (4.0, ("a",))]
    assert finished[0].external_tokens == 29
    assert engine.counters.external_hits_tokens == 29


def test_requests_whose_kv_has_come_wait_in_the_order_of_their_arrival() -> None:
    """With the newest in front, in overload the oldest would never be served."""
    engine = Engine(dataclasses.replace(LIMITS, max_num_seqs=1), UNIT)
    engine.submit(request("first", 4, 8), 0.0)
    for index, name in enumerate(("a", "b", "c")):
        engine.submit(request(name, 4, 1, external_kv_s=0.5), 0.5 + index)
    engine.submit(request("plain", 4, 1), 2.25)
    _, finished = run_until_idle(engine)
    assert [f.request.request_id for f in finished] == ["first", "a", "b", "plain", "c"]


def test_held_kv_occupies_blocks_until_it_is_fetched() -> None:
    engine = Engine(LIMITS, UNIT)
    engine.submit(request("a", 8, 1, hold_kv=True), 0.0)
    run_until_idle(engine)
    assert engine.is_held("a")
    assert engine.pool.used_blocks == 2
    assert engine.release_held("a")
    assert engine.pool.used_blocks == 0
    assert not engine.release_held("a")


def test_an_abort_within_an_iteration_takes_effect_at_once() -> None:
    engine = Engine(LIMITS, UNIT)
    engine.submit(request("a", 4, 5), 0.0)
    engine.submit(request("b", 4, 5), 0.0)
    engine.begin_step(0.0)
    aborted = engine.abort("a", 0.5)
    assert aborted is not None
    assert aborted.reason is FinishReason.ABORT
    assert engine.end_step().emitted == ("b",)
    assert engine.abort("a", 0.6) is None


@pytest.mark.parametrize(
    ("prompt", "output", "text"),
    [(60, 5, "more than max_model_len"), (0, 1, "prompt_tokens must be at least 1"), (1, 0, "output_tokens")],
)
def test_impossible_requests_are_refused(prompt: int, output: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Engine(LIMITS, UNIT).submit(request("a", prompt, output), 0.0)


def test_a_model_longer_than_the_kv_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit into 400 tokens"):
        dataclasses.replace(LIMITS, max_model_len=401)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (BatchWork(0, 1, 0, 0.0), 0.002 + 0.010 + 0.001),
        (BatchWork(1000, 0, 0, 0.0), 0.002 + 0.001 + 0.100),
        (BatchWork(0, 10, 50_000, 0.0), 0.002 + 0.010 + 0.010 + 0.005),
        (BatchWork(1000, 1, 500, 500_000.0), 0.002 + 0.001 + 0.1001 + 0.001 + 0.00005 + 0.05),
    ],
)
def test_iteration_time_is_a_roofline_plus_what_context_costs(work: BatchWork, seconds: float) -> None:
    model = IterationModel(
        host_s=0.002, weights_s=0.01, linear_s=0.001, token_s=1e-4, seq_s=0.001, kv_token_s=1e-7, attention_pair_s=1e-7
    )
    assert model.iteration_s(work) == pytest.approx(seconds)
    assert model.faster(2).iteration_s(work) == pytest.approx(seconds / 2)


@dataclasses.dataclass(frozen=True)
class Load:
    prompt: int
    output: int
    gap_s: float
    prefix: int
    abort_after: int | None
    external: bool


LOADS = st.lists(
    st.builds(
        Load,
        prompt=st.integers(1, 40),
        output=st.integers(1, 24),
        gap_s=st.sampled_from([0.0, 0.0, 0.5, 3.0]),
        prefix=st.integers(0, 2),
        abort_after=st.none() | st.integers(1, 12),
        external=st.booleans(),
    ),
    max_size=14,
)


@settings(max_examples=120, deadline=None)
@given(LOADS, st.integers(1, 4), st.integers(1, 24), st.integers(16, 40))
def test_no_request_is_lost_or_served_twice_and_tokens_in_are_tokens_out(
    loads: list[Load], max_num_seqs: int, budget: int, blocks: int
) -> None:
    limits = EngineLimits(
        max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, block_size=4, num_gpu_blocks=blocks, max_model_len=64
    )
    engine = Engine(limits, UNIT)
    ended: dict[str, FinishedRequest] = {}
    emitted: dict[str, int] = {str(i): 0 for i in range(len(loads))}
    arrivals = []
    at_s = 0.0
    for load in loads:
        at_s += load.gap_s
        arrivals.append(at_s)
    now_s, following, steps = 0.0, 0, 0
    while following < len(loads) or engine.unfinished:
        while following < len(loads) and arrivals[following] <= now_s:
            load = loads[following]
            engine.submit(
                EngineRequest(
                    str(following),
                    load.prompt,
                    load.output,
                    block_hashes=tuple(100 * load.prefix + i for i in range(load.prompt // 4)),
                    external_kv_s=1.5 if load.external else None,
                ),
                now_s,
            )
            following += 1
        ended_s = engine.begin_step(now_s)
        if ended_s is None:
            pending = [t for t in (engine.next_deferred_s(), *arrivals[following : following + 1]) if t is not None]
            assert pending, "requests wait and nothing will ever happen"
            now_s = max(now_s, min(pending))
            continue
        outcome = engine.end_step()
        steps += 1
        assert steps < 5000
        assert outcome.batch_tokens <= budget
        assert engine.num_running <= max_num_seqs
        assert engine.pool.used_blocks <= blocks
        for name in outcome.emitted:
            emitted[name] += 1
        for done in outcome.finished:
            assert done.request.request_id not in ended
            ended[done.request.request_id] = done
        now_s = ended_s
        for name, count in emitted.items():
            after = loads[int(name)].abort_after
            if after is not None and count >= after and name not in ended:
                aborted = engine.abort(name, now_s)
                assert aborted is not None
                ended[name] = aborted
    assert sorted(ended, key=int) == [str(i) for i in range(len(loads))]
    for name, done in ended.items():
        load = loads[int(name)]
        assert done.generated_tokens == emitted[name]
        if done.reason is FinishReason.LENGTH:
            assert emitted[name] == load.output
            computed = load.prompt - done.cached_tokens - done.external_tokens
            assert 1 <= computed <= load.prompt
            assert done.scheduled_s is not None
            assert done.first_token_s is not None
            assert done.last_token_s is not None
            assert done.arrival_s <= done.scheduled_s < done.first_token_s <= done.last_token_s
    assert engine.pool.used_blocks == 0
