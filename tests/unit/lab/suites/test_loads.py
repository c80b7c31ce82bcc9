"""Loads of the TRE suite: the search, the packaged figures, and that they are what the probes reckon with."""

import math

import pytest

from lab.suites.calibrate_loads import attained
from lab.suites.capacity import ATTAINMENT, highest_rps
from lab.suites.loads import MAIN, MAIN_RANGE, TARGETS, packaged_loads, read_loads, scale_for
from lab.suites.static_fleets import run_static
from lab.suites.tre_setup import SLOS, STATIC_SPLIT, TRAINING_SEEDS, profiles
from simulator.traces.model import TraceRequest
from simulator.traces.probes import CHAT, MODELS, PROBES, TOKEN_S
from trimtab.config.yamlfile import YamlError


def falling(factor):
    """Attains 0.8 at a factor of 2."""
    return 1.0 / (1.0 + (factor / 4.0) ** 2)


@pytest.mark.parametrize("start", [0.05, 1.0, 2.0, 40.0])
@pytest.mark.parametrize("target", [0.6, 0.8, 0.92])
def test_the_search_ends_where_it_should_from_anywhere(start, target):
    factor, attained_there = scale_for(falling, target, start=start, tolerance=0.001)
    assert attained_there == falling(factor)
    assert attained_there == pytest.approx(target, abs=0.001)


def test_the_search_takes_the_nearest_of_a_curve_that_jumps():
    factor, attained_there = scale_for(lambda f: 0.95 if f < 1.3 else 0.5, 0.8)
    assert attained_there == 0.95
    assert factor < 1.3


def test_a_target_that_no_load_attains_is_refused():
    with pytest.raises(ValueError, match=r"no load between 0.01 and 100 times attains 0.8"):
        scale_for(lambda factor: 0.3, 0.8)


def test_every_trace_has_its_loads_at_what_they_should_attain():
    loads = packaged_loads()
    assert list(loads.traces) == list(PROBES)
    for trace, by_name in loads.traces.items():
        assert list(by_name) == list(TARGETS)
        for name, load in by_name.items():
            assert load.static_attainment == pytest.approx(TARGETS[name], abs=0.03), (trace, name)
        assert MAIN_RANGE[0] <= by_name[MAIN].static_attainment <= MAIN_RANGE[1]
        assert by_name["light"].rate_scale < by_name[MAIN].rate_scale < by_name["heavy"].rate_scale


def test_the_packaged_load_of_the_shortest_trace_still_attains_what_it_says():
    load = packaged_loads().traces["real-code"][MAIN]
    assert attained("real-code", load.rate_scale, TRAINING_SEEDS) == pytest.approx(load.static_attainment, abs=0.004)


def test_probes_reckon_with_the_costs_that_were_found():
    for model, cost in packaged_loads().costs.items():
        prompt_s, output_s = TOKEN_S[model]
        assert cost.prompt_token_s == pytest.approx(prompt_s, rel=0.02)
        assert cost.output_token_s == pytest.approx(output_s, rel=0.02)
        assert cost.request_s(TraceRequest(0.0, model, 1000, 10)) == pytest.approx(
            1000 * cost.prompt_token_s + 10 * cost.output_token_s
        )
    assert set(packaged_loads().costs) == set(MODELS)


def test_a_replica_is_full_at_its_highest_rate():
    model = "dsllama-8b"
    rps = highest_rps(profiles()[model], SLOS[model], CHAT)
    cost = packaged_loads().costs[model]
    lengths = TraceRequest(0.0, model, round(CHAT[0].mean_tokens), round(CHAT[1].mean_tokens))
    assert rps * cost.request_s(lengths) == pytest.approx(1.0, rel=0.03)
    assert 0 < ATTAINMENT < 1


def test_a_static_split_counts_every_model_by_its_requests():
    requests = [TraceRequest(0.01 * i, "dsllama-8b", 100, 20) for i in range(30)]
    requests += [TraceRequest(10.0, "dsqwen-14b", 30_000, 2000)]
    slos = {**SLOS, "dsqwen-14b": type(SLOS["dsqwen-14b"])(ttft_s=1e-3, tpot_s=0.075)}
    outcome = run_static(requests, profiles=profiles(), slos=slos, replicas=STATIC_SPLIT)
    assert outcome.by_model == {"dsllama-8b": 1.0, "dsqwen-14b": 0.0}
    assert outcome.attainment == pytest.approx(30 / 31)
    assert math.isfinite(outcome.e2e_p99_s)
    with pytest.raises(ValueError, match="no request was served"):
        run_static([], profiles=profiles(), slos=SLOS, replicas=STATIC_SPLIT)


@pytest.mark.parametrize(
    "text",
    ["", "a: 1", "found_by: x\ntraces: {t: {main: {rate_scale: 0, static_attainment: 0.8}}}\ncosts: {}", "[1]"],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path, text):
    path = tmp_path / "loads.yaml"
    path.write_text(text)
    with pytest.raises(YamlError, match=r"loads\.yaml: not the figures of calibrate_loads"):
        read_loads(path)
