"""The metrics page: families, types and labels as written out here; help texts and bucket edges too, as in recorded
pages of vLLM 0.32, where they are at hand."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from simulator.core.requests import StepOutcome

VALUES_MATTER = ("source", "reason", "sleep_state", "finished_reason", "operation", "le")


def shape(page: str) -> dict[str, tuple[str, str, frozenset[tuple[tuple[str, str], ...]]]]:
    """Family → (type, help, label sets of its samples); values of labels that name things are left out."""
    found = {}
    for family in text_string_to_metric_families(page):
        labels = {
            (s.name, *sorted((k, v if k in VALUES_MATTER else "*") for k, v in s.labels.items()))
            for s in family.samples
        }
        found[family.name] = (family.type, family.documentation, frozenset(labels))
    return found


@pytest.fixture(scope="session")
def captured(capture: Callable[[str], bytes]) -> Callable[[str], str]:
    """A recorded page as text."""
    return lambda name: capture(name).decode()


async def fetch(http, url: str, **headers: str) -> str:
    async with http.get(url, headers=headers) as response:
        assert response.status == 200
        return await response.text()


async def use_like_the_recorded_server(http, url: str) -> None:
    """The handlers and operations that the recorded page has series of."""
    for path in ("/is_sleeping", "/is_paused", "/v1/models", "/nothing"):
        async with http.get(url + path):
            pass
    for path in ("/v1/completions", "/tokenize"):
        async with http.post(url + path, json={"model": "tiny", "prompt": "a b", "max_tokens": 2}):
            pass
    async with http.post(url + "/sleep"):
        pass
    async with http.post(url + "/wake_up"):
        pass


# Family → (type, labels of its samples besides model_name and engine), for a server that slept and woke.
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "num_requests_running": ("gauge", ()),
    "num_requests_waiting": ("gauge", ()),
    "num_requests_waiting_by_reason": ("gauge", ("reason",)),
    "engine_sleep_state": ("gauge", ("sleep_state",)),
    "kv_cache_usage_perc": ("gauge", ()),
    "prefix_cache_queries": ("counter", ()),
    "prefix_cache_hits": ("counter", ()),
    "external_prefix_cache_queries": ("counter", ()),
    "external_prefix_cache_hits": ("counter", ()),
    "num_preemptions": ("counter", ()),
    "prompt_tokens": ("counter", ()),
    "prompt_tokens_by_source": ("counter", ("source",)),
    "prompt_tokens_cached": ("counter", ()),
    "generation_tokens": ("counter", ()),
    "request_success": ("counter", ("finished_reason",)),
    # A histogram, in spite of its name.
    "iteration_tokens_total": ("histogram", ("le",)),
    "request_prompt_tokens": ("histogram", ("le",)),
    "request_generation_tokens": ("histogram", ("le",)),
    "time_to_first_token_seconds": ("histogram", ("le",)),
    "inter_token_latency_seconds": ("histogram", ("le",)),
    "request_time_per_output_token_seconds": ("histogram", ("le",)),
    "e2e_request_latency_seconds": ("histogram", ("le",)),
    "request_queue_time_seconds": ("histogram", ("le",)),
    "request_prefill_time_seconds": ("histogram", ("le",)),
    "request_decode_time_seconds": ("histogram", ("le",)),
    "sleep_mode_operation_duration_seconds": ("histogram", ("le", "operation")),
    "sleep_mode_operations_in_flight": ("gauge", ("operation",)),
}


async def test_families_have_their_type_and_labels(make_server, http) -> None:
    at = await make_server()
    await use_like_the_recorded_server(http, at.url)
    found = {
        family.name.removeprefix("vllm:"): (
            family.type,
            tuple(sorted({label for s in family.samples for label in s.labels} - {"engine", "model_name"})),
        )
        for family in text_string_to_metric_families(await fetch(http, at.url + "/metrics"))
        if family.name.startswith("vllm:")
    }
    assert {name: found.get(name) for name in FAMILIES} == FAMILIES


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("engine_sleep_state", "sleep_state", ["awake", "discard_all", "weights_offloaded"]),
        ("num_requests_waiting_by_reason", "reason", ["capacity", "deferred"]),
        ("prompt_tokens_by_source_total", "source", ["external_kv_transfer", "local_cache_hit", "local_compute"]),
        ("request_success_total", "finished_reason", ["abort", "error", "length", "repetition", "stop"]),
    ],
)
async def test_a_label_has_all_its_values_from_the_start(make_server, http, name: str, label: str, values) -> None:
    at = await make_server()
    found = [
        s.labels[label]
        for family in text_string_to_metric_families(await fetch(http, at.url + "/metrics"))
        for s in family.samples
        if s.name == "vllm:" + name
    ]
    assert sorted(found) == values


async def test_families_types_help_and_labels_are_those_of_the_recorded_server(make_server, http, captured) -> None:
    at = await make_server()
    await use_like_the_recorded_server(http, at.url)
    ours, real = shape(await fetch(http, at.url + "/metrics")), shape(captured("metrics-s3-woken"))
    assert sorted(set(real) - set(ours)) == []
    assert sorted(set(ours) - set(real)) == []
    for name, (kind, documentation, labels) in real.items():
        assert ours[name][0] == kind, name
        assert ours[name][1] == documentation, name
        if name.startswith(("vllm:", "process", "python_gc")):
            mine = ours[name][2]
            # A longer maximum gives more token edges; the recorded model is as long as ours.
            assert sorted(mine) == sorted(labels), name


async def test_the_order_of_families_is_the_recorded_one(make_server, http, captured) -> None:
    at = await make_server()
    await use_like_the_recorded_server(http, at.url)
    headers = [
        [line for line in page.splitlines() if line.startswith("# TYPE")]
        for page in (await fetch(http, at.url + "/metrics"), captured("metrics-s3-woken"))
    ]
    assert headers[0] == headers[1]


async def test_a_fresh_page_has_no_sleep_families(make_server, http) -> None:
    at = await make_server()
    page = await fetch(http, at.url + "/metrics")
    assert "sleep_mode_operation" not in page
    assert 'vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 1.0' in page


async def test_a_fresh_page_has_the_families_of_a_fresh_recorded_one(make_server, http, captured) -> None:
    at = await make_server()
    ours, real = shape(await fetch(http, at.url + "/metrics")), shape(captured("metrics-idle-fresh"))
    assert "sleep_mode_operation" not in captured("metrics-idle-fresh")
    assert sorted(ours) == sorted(real)


FILTERED = ("num_requests_running", "kv_cache_usage_perc", "prompt_tokens_by_source_total", "engine_sleep_state")
FILTER = "&".join(f"name[]=vllm:{name}" for name in FILTERED)


async def test_the_filtered_page_is_the_recorded_one(make_server, http, captured) -> None:
    at = await make_server()
    filtered = await fetch(http, at.url + "/metrics/?" + FILTER)
    assert sorted(filtered.splitlines()) == sorted(captured("metrics-name-filter").splitlines())


async def test_metrics_ignores_filters_and_encodings_but_the_mount_honours_them(make_server, http) -> None:
    at = await make_server()
    whole = await fetch(http, at.url + "/metrics?" + FILTER)
    assert len(whole) > 20_000
    filtered = await fetch(http, at.url + "/metrics/?" + FILTER)
    kinds = {line.split()[2]: line.split()[3] for line in filtered.splitlines() if line.startswith("# TYPE")}
    assert kinds == {f"vllm:{name}": "counter" if name.endswith("_total") else "gauge" for name in FILTERED}
    label = 'engine="0",model_name="tiny"'
    assert sorted(line for line in filtered.splitlines() if not line.startswith("#")) == sorted(
        [
            f"vllm:num_requests_running{{{label}}} 0.0",
            f"vllm:kv_cache_usage_perc{{{label}}} 0.0",
            f'vllm:prompt_tokens_by_source_total{{{label},source="local_compute"}} 0.0',
            f'vllm:prompt_tokens_by_source_total{{{label},source="local_cache_hit"}} 0.0',
            f'vllm:prompt_tokens_by_source_total{{{label},source="external_kv_transfer"}} 0.0',
            f'vllm:engine_sleep_state{{{label},sleep_state="awake"}} 1.0',
            f'vllm:engine_sleep_state{{{label},sleep_state="weights_offloaded"}} 0.0',
            f'vllm:engine_sleep_state{{{label},sleep_state="discard_all"}} 0.0',
        ]
    )
    async with http.get(at.url + "/metrics/", headers={"Accept-Encoding": "gzip"}) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        assert "vllm:num_requests_running" in await response.text()
    async with http.get(at.url + "/metrics", headers={"Accept-Encoding": "gzip"}) as response:
        assert "Content-Encoding" not in response.headers


async def test_openmetrics_is_what_prometheus_can_parse(make_server, http) -> None:
    at = await make_server()
    await use_like_the_recorded_server(http, at.url)
    async with http.get(at.url + "/metrics/", headers={"Accept": "application/openmetrics-text"}) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        page = await response.text()
    assert page.endswith("# EOF\n")
    assert 'vllm_num_requests_running{engine="0",model_name="tiny"} 0.0' in page
    assert "# TYPE vllm:prompt_tokens counter\n" in page
    assert "\nvllm_prompt_tokens_total{" in page
    assert list(parse_openmetrics(page.replace("vllm:", "vllm_")))


async def test_openmetrics_has_the_recorded_families(make_server, http, captured) -> None:
    at = await make_server()
    async with http.get(at.url + "/metrics/", headers={"Accept": "application/openmetrics-text"}) as response:
        page = await response.text()
    recorded = captured("metrics-openmetrics")
    heads = {line for line in recorded.splitlines() if line.startswith("# TYPE vllm:")}
    ours = {line for line in page.splitlines() if line.startswith("# TYPE vllm:")}
    assert heads <= ours


async def test_counters_add_up_over_a_few_requests(make_server, http) -> None:
    at = await make_server()
    prompt = "abcd" * 40
    for _ in range(2):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 5}
        async with http.post(at.url + "/v1/completions", json=body) as response:
            assert response.status == 200
    totals: dict[str, float] = defaultdict(float)
    by_label: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(await fetch(http, at.url + "/metrics")):
        for s in family.samples:
            totals[s.name] += s.value
            for key in ("source", "finished_reason"):
                if key in s.labels:
                    by_label[s.name, s.labels[key]] = s.value
    assert totals["vllm:prompt_tokens_total"] == 80
    assert totals["vllm:generation_tokens_total"] == 10
    assert totals["vllm:prefix_cache_queries_total"] == 80
    assert totals["vllm:prefix_cache_hits_total"] == 32
    assert by_label["vllm:prompt_tokens_by_source_total", "local_compute"] == 48
    assert by_label["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 32
    assert by_label["vllm:request_success_total", "length"] == 2
    assert totals["vllm:time_to_first_token_seconds_count"] == 2
    assert totals["vllm:inter_token_latency_seconds_count"] == 8
    assert totals["vllm:kv_cache_usage_perc"] == 0
    # As in the recorded pages: computed prompt tokens plus generated ones.
    assert totals["vllm:iteration_tokens_total_sum"] == 58
    assert totals["vllm:iteration_tokens_total_count"] == 10


def test_the_recorded_iteration_tokens_are_computed_prompt_tokens_plus_generated_ones(captured) -> None:
    total: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(captured("metrics-a1-inflight-before-sleep")):
        for s in family.samples:
            if s.labels.get("source", "local_compute") == "local_compute":
                total[s.name] += s.value
    computed = total["vllm:prompt_tokens_by_source_total"]
    assert total["vllm:iteration_tokens_total_sum"] == computed + total["vllm:generation_tokens_total"]


async def test_prompt_tokens_jump_at_the_first_token_and_queries_at_admission(make_server, http, monkeypatch) -> None:
    at = await make_server()
    step_ended, pages = at.server.step_ended, []

    def noted(outcome: StepOutcome) -> None:
        step_ended(outcome)
        pages.append(at.server.page.render())

    monkeypatch.setattr(at.server, "step_ended", noted)
    body = {"model": "tiny", "prompt": list(range(4000)), "max_tokens": 1}
    async with http.post(at.url + "/v1/completions", json=body) as response:
        assert response.status == 200
    half, *_, whole = pages
    assert 'vllm:prompt_tokens_total{engine="0",model_name="tiny"} 0.0' in half
    assert 'vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 4000.0' in half
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 1.0' in half
    assert 'vllm:prompt_tokens_total{engine="0",model_name="tiny"} 4000.0' in whole


async def test_a_page_under_load_takes_less_than_a_millisecond_of_processor_time(make_server, http) -> None:
    at = await make_server()
    await use_like_the_recorded_server(http, at.url)
    best_s = 1.0
    for _ in range(20):
        for family in at.server.page._families:
            family.touch()
        started_s = time.process_time()
        at.server.page.render()
        best_s = min(best_s, time.process_time() - started_s)
    assert best_s < 0.002, "with every family changed"
    best_s = 1.0
    for _ in range(50):
        started_s = time.process_time()
        at.server.page.render()
        best_s = min(best_s, time.process_time() - started_s)
    assert best_s < 0.0005, "with nothing changed"


@pytest.mark.parametrize("name", ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"])
async def test_gauges_are_written_by_iterations_not_by_reading_the_page(make_server, http, until, name: str) -> None:
    at = await make_server()
    before = await fetch(http, at.url + "/metrics")
    at.server.driver.set_frozen(True)
    pending = asyncio.create_task(
        http.post(at.url + "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2})
    )
    await until(lambda: at.server.load == 1)
    line = next(x for x in before.splitlines() if x.startswith(name + "{"))
    assert line in (await fetch(http, at.url + "/metrics")).splitlines()
    at.server.driver.set_frozen(False)
    async with await pending as response:
        assert response.status == 200
