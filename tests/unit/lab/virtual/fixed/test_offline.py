"""Fleets on virtual time: nothing lost, nothing twice, and what a lone engine would do, they do."""

import collections
import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.virtual.clock import EngineClock
from lab.virtual.fixed.colocated import ColocatedFleet
from lab.virtual.fixed.disaggregated import DisaggregatedFleet
from lab.virtual.fixed.records import Quantiles, Records
from lab.virtual.fixed.routing import LeastLoaded
from lab.virtual.network import Place, link_between
from simulator.core.event_engine import EventEngine
from simulator.core.limits import EngineLimits
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.core.timing import IterationModel, KvLink
from simulator.traces.model import TraceRequest

LIMITS = EngineLimits(max_num_batched_tokens=64, max_num_seqs=4, block_size=4, num_gpu_blocks=60, max_model_len=128)
TIMING = IterationModel(
    host_s=0.01,
    weights_s=0.02,
    linear_s=0.005,
    token_s=0.001,
    seq_s=0.0001,
    kv_token_s=0.00002,
    attention_pair_s=0.000001,
)
LINK = KvLink(latency_s=0.01, bytes_per_s=1000.0, kv_bytes_per_token=1.0)

TRACES = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.013, 0.2, 1.7]), st.integers(1, 60), st.integers(1, 40)),
    min_size=1,
    max_size=40,
).map(
    lambda rows: [
        TraceRequest(sum(gap for gap, _, _ in rows[: index + 1]), "s", prompt, output)
        for index, (_, prompt, output) in enumerate(rows)
    ]
)


def engine() -> EventEngine:
    return EventEngine(LIMITS, TIMING)


@settings(max_examples=80, deadline=None)
@given(TRACES, st.integers(1, 5))
def test_a_fleet_serves_every_request_once_and_gives_its_blocks_back(trace: list[TraceRequest], replicas: int) -> None:
    fleet = ColocatedFleet()
    for _ in range(replicas):
        fleet.add(engine())
    records = fleet.run(trace)
    assert collections.Counter(zip(records.prompt_tokens.tolist(), records.output_tokens.tolist(), strict=True)) == (
        collections.Counter((r.prompt_tokens, r.output_tokens) for r in trace)
    )
    assert records.aborted == 0
    assert (records.ttft_s > 0).all()
    for one in fleet.clock.engines:
        gauges = one.observe(math.inf)
        assert (one.unfinished, gauges.used_blocks, gauges.running) == (0, 0, 0)
    assert sum(e.observe(math.inf).generated_tokens for e in fleet.clock.engines) == sum(r.output_tokens for r in trace)


@settings(max_examples=80, deadline=None)
@given(TRACES, st.integers(1, 4))
def test_requests_end_in_order_of_time_and_as_in_engines_that_are_watched_at_every_event(
    trace: list[TraceRequest], replicas: int
) -> None:
    ended: list[tuple[float, int, str]] = []
    clock = EngineClock(lambda index, one: ended.append((one.finished_s, index, one.request.request_id)))
    watched = [engine() for _ in range(replicas)]
    expected: list[tuple[float, int, str]] = []
    for _ in range(replicas):
        clock.add(engine())
    for number, one in enumerate(trace):
        request = EngineRequest(str(number), one.prompt_tokens, one.output_tokens)
        index = number % replicas
        clock.run_before(one.arrival_s)
        clock.submit(index, request, one.arrival_s)
        while watched[index].next_s < one.arrival_s:
            expected += [(f.finished_s, index, f.request.request_id) for f in watched[index].fire()]
        watched[index].submit(request, one.arrival_s)
    clock.run_before(math.inf)
    for index, one_engine in enumerate(watched):
        while one_engine.next_s < math.inf:
            expected += [(f.finished_s, index, f.request.request_id) for f in one_engine.fire()]
    assert sorted(ended) == sorted(expected)
    times = [at_s for at_s, _, _ in ended]
    assert times == pytest.approx(sorted(times), rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(TRACES, st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_a_disaggregated_service_serves_every_request_once_and_frees_both_sides(
    trace: list[TraceRequest], prefill: int, decode: int, sends_first: bool
) -> None:
    fleet = DisaggregatedFleet(LINK, prefill_sends_first_token=sends_first)
    for _ in range(prefill):
        fleet.add_prefill(engine())
    for _ in range(decode):
        fleet.add_decode(engine())
    records = fleet.run(trace)
    assert sorted(records.prompt_tokens.tolist()) == sorted(r.prompt_tokens for r in trace)
    assert sorted(records.output_tokens.tolist()) == sorted(r.output_tokens for r in trace)
    for one in fleet.clock.engines:
        assert (one.unfinished, one.held_requests, one.observe(math.inf).used_blocks) == (0, (), 0)


def serve_one(*, same_switch: bool) -> Records:
    fleet = DisaggregatedFleet(LINK, prefill_sends_first_token=False)
    fleet.add_prefill(engine(), Place(s1="s1-0"))
    fleet.add_decode(engine(), Place(s1="s1-0" if same_switch else "s1-1"))
    return fleet.run([TraceRequest(1.0, "s", 40, 1)])


def test_kv_takes_a_quarter_longer_under_another_switch() -> None:
    """40 bytes at 1,000 a second: 40 ms; at 800 a second: 50 ms."""
    near, far = serve_one(same_switch=True), serve_one(same_switch=False)
    assert far.ttft_s[0] - near.ttft_s[0] == pytest.approx(0.010)
    prefill_s = TIMING.host_s + TIMING.linear_s + 40 * TIMING.token_s + 800 * TIMING.attention_pair_s
    last_token_s = TIMING.host_s + TIMING.weights_s + TIMING.seq_s + 39 * TIMING.kv_token_s
    assert near.ttft_s[0] == pytest.approx(prefill_s + LINK.transfer_s(40) + last_token_s)


@pytest.mark.parametrize(
    ("source", "target", "bytes_per_s"),
    [
        (Place("s1-0", "s2-0"), Place("s1-0", "s2-0"), 1000.0),
        (Place("s1-0", "s2-0"), Place("s1-1", "s2-0"), 800.0),
        (Place("s1-0", "s2-0"), Place("s1-0", "s2-1"), 800.0),
        (Place("s1-0", "s2-0", "east"), Place("s1-0", "s2-0", "west"), 800.0),
    ],
)
def test_the_link_is_whole_only_under_one_s1(source: Place, target: Place, bytes_per_s: float) -> None:
    assert link_between(LINK, source, target).bytes_per_s == bytes_per_s


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from([1, 1, 1, -1])), max_size=200))
def test_the_least_loaded_is_who_a_plain_search_finds(changes: list[tuple[int, int]]) -> None:
    router, loads = LeastLoaded(), dict.fromkeys(range(6), 0)
    for member in loads:
        router.add(member)
    for member, by in changes:
        if loads.get(member, 1) + by < 0:
            continue
        router.change(member, by)
        if member in loads:
            loads[member] += by
        assert router.least() == min(loads, key=lambda m: (loads[m], m))
    router.remove(0)
    assert router.least() != 0
    assert len(router) == 5


def test_a_router_without_members_chooses_nobody_and_refuses_a_second_entry() -> None:
    router = LeastLoaded()
    assert router.least() is None
    router.add(3)
    with pytest.raises(ValueError, match="is in already"):
        router.add(3)
    with pytest.raises(ValueError, match="would be -1"):
        router.change(3, -1)


def test_a_request_without_any_replica_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no replica takes the request at 2\.000 s"):
        ColocatedFleet().submit(TraceRequest(2.0, "s", 1, 1))


def test_latencies_of_a_record_follow_from_its_three_times() -> None:
    records = Records()
    for arrival_s, first_s, end_s, tokens in ((0.0, 1.0, 5.0, 5), (2.0, 2.5, 2.5, 1)):
        records.add_times(
            arrival_s=arrival_s,
            first_token_s=first_s,
            finished_s=end_s,
            prompt_tokens=7,
            output_tokens=tokens,
            replica=0,
        )
    assert records.ttft_s.tolist() == [1.0, 0.5]
    assert records.tpot_s.tolist() == [1.0]
    assert records.e2e_s.tolist() == [5.0, 0.5]
    assert records.attainment(ttft_s=0.6, tpot_s=0.5) == 0.5
    quantiles = Quantiles.of(records.ttft_s)
    assert quantiles is not None
    assert dataclasses.astuple(quantiles) == pytest.approx((0.75, 0.75, 0.975, 0.995))
    assert Quantiles.of(records.tpot_s[:0]) is None
    with pytest.raises(ValueError, match="no request was served"):
        Records().attainment(ttft_s=1.0, tpot_s=1.0)


def test_an_aborted_request_is_counted_and_has_no_latency() -> None:
    ended: list[FinishedRequest] = []
    clock = EngineClock(lambda _, one: ended.append(one))
    index = clock.add(engine())
    clock.submit(index, EngineRequest("a", 20, 30), 0.0)
    clock.run_before(0.2)
    aborted = clock.at(index, 0.2).abort("a", 0.2)
    clock.touched(index)
    clock.run_before(math.inf)
    records = Records()
    assert aborted is not None
    records.add(aborted, index)
    assert (len(records), records.aborted, ended) == (0, 1, [])
