"""What roles and GPU counters look like from outside, on virtual time."""

import itertools

import pytest

from lab.virtual.experts import staged
from lab.virtual.fixed.ratio_sweep import RatioService, peak, sweep
from lab.virtual.gpu_outputs import GPU_POWER, GpuOutputs, gpu_outputs
from simulator.core.event_engine import EventEngine
from simulator.core.requests import EngineRequest
from simulator.core.timing import BatchWork, IterationModel
from simulator.profiles import packaged_profiles
from simulator.traces.generators import Curve, Lengths, ServiceLoad, generate

H100 = packaged_profiles()["h100-8b-tp1"]


def decode_replica(rate_rps: float, seconds: float = 240.0) -> tuple[GpuOutputs, float]:
    """Outputs of one decode replica over the last two thirds, and the mean time between tokens at P90 in seconds.

    1,000 tokens of KV come with each request, 300 are generated; a request's first token came from prefill, so the wait
    for a place in the batch counts between its tokens.
    """
    engine = EventEngine(H100.engine_limits(), H100.iteration_model())
    load = ServiceLoad(
        service="s",
        request_rps=Curve(((0.0, rate_rps),)),
        prompt=Lengths(mean_tokens=1000, cv=0.3, max_tokens=4000),
        output=Lengths(mean_tokens=300, cv=0.3, max_tokens=1200),
    )
    finished = []
    before = engine.observe(0.0)
    for number, one in enumerate(generate([load], duration_s=seconds, seed=4)):
        if one.arrival_s >= seconds / 3 > 0 and before.steps == 0:
            finished += engine.advance(seconds / 3)
            before = engine.observe(seconds / 3)
        finished += engine.advance(one.arrival_s)
        engine.submit(
            EngineRequest(str(number), one.prompt_tokens, one.output_tokens, external_kv_s=0.01), one.arrival_s
        )
    finished += engine.advance(seconds)
    after = engine.observe(seconds)
    outputs = gpu_outputs(
        before, after, window_s=seconds * 2 / 3, timing=H100.iteration_model(), power=GPU_POWER["H100"]
    )
    gaps_s = sorted((f.finished_s - f.arrival_s) / f.generated_tokens for f in finished)
    return outputs, gaps_s[int(0.9 * len(gaps_s))]


def test_decode_utilisation_is_high_and_flat_while_latency_has_a_cliff_where_the_batch_is_full() -> None:
    """HeteroScale's finding, figure 2: nobody put it into the model. A full batch serves about 33 requests a second."""
    rates_rps = [4.0, 8.0, 16.0, 24.0, 30.0, 48.0]
    seen = [decode_replica(rate) for rate in rates_rps]
    utilisation = [outputs.gpu_utilisation_ratio for outputs, _ in seen]
    gaps_s = [gap for _, gap in seen]
    assert min(utilisation) > 0.99, "fully utilised from an eighth of the load on"
    steps = [after / before for before, after in itertools.pairwise(gaps_s)]
    assert max(steps[:4]) < 1.5, "eight times the load, never half as much again from one point to the next"
    assert steps[4] > 4, "and then the cliff"
    rates = [outputs.generated_tps for outputs, _ in seen]
    assert rates[3] / rates[0] == pytest.approx(6.0, rel=0.1), "tokens a second follow the load"
    power_w = [outputs.power_w for outputs, _ in seen]
    assert power_w == sorted(power_w)
    active = [outputs.sm_activity_ratio for outputs, _ in seen]
    assert active == sorted(active)
    assert 0.6 < active[0] < active[-1] < 0.98, "kernels that wait for memory are on the SMs; the host's part is not"
    assert seen[0][0].arithmetic_ratio < 0.05, "one token a sequence and iteration leaves the arithmetic idle"


def test_prefill_utilisation_follows_the_load() -> None:
    shares = []
    for rate_rps in (2.0, 6.0):
        engine = EventEngine(H100.engine_limits(), H100.iteration_model())
        before = engine.observe(0.0)
        for number in range(int(60 * rate_rps)):
            engine.advance(number / rate_rps)
            engine.submit(EngineRequest(str(number), 3000, 1), number / rate_rps)
        engine.advance(60.0)
        after = engine.observe(60.0)
        shares.append(gpu_outputs(before, after, window_s=60.0, timing=H100.iteration_model(), power=GPU_POWER["H100"]))
    assert shares[1].gpu_utilisation_ratio / shares[0].gpu_utilisation_ratio == pytest.approx(3.0, rel=0.02)
    assert shares[1].sm_activity_ratio / shares[0].sm_activity_ratio == pytest.approx(3.0, rel=0.02)
    assert 0.9 < shares[0].sm_activity_ratio / shares[0].gpu_utilisation_ratio < 1.0
    assert shares[0].arithmetic_ratio == pytest.approx(2 * 3000 * H100.timing.token_s, rel=0.02)
    assert shares[0].power_w == pytest.approx(75.0 + 625.0 * shares[0].arithmetic_ratio)


def test_an_idle_replica_draws_idle_power_and_a_window_has_a_length() -> None:
    engine = EventEngine(H100.engine_limits(), H100.iteration_model())
    gauges = engine.observe(0.0)
    outputs = gpu_outputs(gauges, gauges, window_s=1.0, timing=H100.iteration_model(), power=GPU_POWER["H100"], gpus=2)
    assert (outputs.gpu_utilisation_ratio, outputs.sm_activity_ratio, outputs.power_w) == (0.0, 0.0, 150.0)
    with pytest.raises(ValueError, match="window_s must be positive"):
        gpu_outputs(gauges, gauges, window_s=0.0, timing=H100.iteration_model(), power=GPU_POWER["H100"])


UNIT_COSTS = IterationModel(
    host_s=0.0, weights_s=0.001, linear_s=0.0, token_s=0.001, seq_s=0.0, kv_token_s=0.0, attention_pair_s=0.0
)


@pytest.mark.parametrize(
    ("attention", "ffn", "seconds"),
    [
        # 1,000 tokens take 1 s in one replica: 0.25 s of attention, 0.75 s of FFN, in four micro-batches.
        (1, 1, 0.75 + 0.25 / 4),
        (1, 3, 0.25 + 0.25 / 4),
        (2, 3, 0.25 + 0.125 / 4),
        (4, 3, 0.25 + 0.0625 / 4),
    ],
)
def test_the_slower_pool_of_a_mixture_of_experts_sets_the_pace(attention: int, ffn: int, seconds: float) -> None:
    model = staged(UNIT_COSTS, ffn_share=0.75, attention_replicas=attention, ffn_replicas=ffn)
    assert model.iteration_s(BatchWork(1000, 0, 0, 0.0)) == pytest.approx(seconds)


def test_a_unit_of_attention_and_ffn_replicas_runs_as_an_engine() -> None:
    model = staged(H100.iteration_model(), ffn_share=0.67, attention_replicas=1, ffn_replicas=2, exchange_s=0.002)
    engine = EventEngine(H100.engine_limits(), model)
    engine.submit(EngineRequest("a", 3000, 1), 0.0)
    (finished,) = engine.advance(10.0)
    assert finished.finished_s == model.iteration_s(BatchWork(3000, 0, 0, 3000 * 1500.0))
    with pytest.raises(ValueError, match="ffn_share"):
        staged(H100.iteration_model(), ffn_share=1.0, attention_replicas=1, ffn_replicas=1)
    with pytest.raises(ValueError, match="at least 1"):
        staged(H100.iteration_model(), ffn_share=0.5, attention_replicas=0, ffn_replicas=1)


def test_too_few_prefill_replicas_bind_ttft_too_many_bind_tbt_and_the_peak_is_between() -> None:
    service = RatioService(name="short A", prompt_tokens=3000, output_tokens=350, ttft_s=1.0, tbt_s=0.040)
    points = list(sweep(service, H100, H100, replicas=5, requests=400))
    best = points.index(peak(points))
    assert 0 < best < len(points) - 1
    assert points[0].bound == "TTFT"
    assert points[-1].bound == "TBT"
    assert points[0].goodput_rps < points[best].goodput_rps > points[-1].goodput_rps
    assert all(point.ttft_s <= 1.0 and point.tbt_s <= 0.040 for point in points)


def test_limits_that_nobody_can_meet_are_named() -> None:
    service = RatioService(name="hasty", prompt_tokens=3000, output_tokens=350, ttft_s=1.0, tbt_s=0.001)
    with pytest.raises(ValueError, match="hasty: TBT is missed"):
        next(sweep(service, H100, H100, replicas=4, requests=100))
