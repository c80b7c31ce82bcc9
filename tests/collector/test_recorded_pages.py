"""The reader on pages that a real vLLM 0.32 wrote; skipped where there are none."""

import math
import re
from collections.abc import Callable

import pytest

from metrics_collector.core.dialect import VLLM_V1, Quantity
from metrics_collector.core.exposition import PageError, PageReader

READER = PageReader(VLLM_V1)

# What stands on the captured pages, read off by eye: gauges, counters, and (count, sum) of TTFT.
CAPTURED: dict[str, dict[str, object]] = {
    "metrics-idle-fresh": {"running": 0, "waiting": 0, "kv_usage": 0, "generation_tokens": 0, "ttft": (0, 0)},
    "metrics-after-load": {
        "running": 0,
        "awake": 1,
        "start_time": 1795995433.04,
        "prompt_tokens": 31904,
        "prompt_computed": 20128,
        "prompt_cache_hit": 11776,
        "prompt_cached": 11776,
        "generation_tokens": 9620,
        "prefix_queries": 31904,
        "prefix_hits": 11776,
        "preemptions": 0,
        "finished": 51,
        "ttft": (51, 72.37943625450134),
    },
    "metrics-a1-inflight-before-sleep": {"running": 3, "kv_usage": 0.0007325112928824318, "generation_tokens": 10128},
    # Sixteen requests were aborted by the sleep: "success" on the page, not finished here.
    "metrics-a2-after-abort-sleep": {"running": 0, "awake": 0, "finished": 51, "generation_tokens": 10143},
    "metrics-s1-slept-level1": {"awake": 0, "running": 0, "generation_tokens": 9620},
    "metrics-s3-woken": {"awake": 1},
    "metrics-s5-partial-wake-weights": {"awake": 0},
    "metrics-s7-slept-level0": {"awake": 0},
    "metrics-p2-paused-keep": {"awake": 1},
    # Frozen: two requests "run" in a server that sleeps.
    "metrics-k1-sleep-keep-inflight": {"awake": 0, "running": 2, "generation_tokens": 16406},
    "metrics-after-restart": {"start_time": 1795995936.62, "generation_tokens": 0},
    "flags-metrics-under-load-0": {"running": 6, "waiting": 18, "kv_usage": 0.9119496855345912},
    "flags-metrics-under-load-5": {
        "running": 4,
        "waiting": 14,
        "prompt_computed": 4616,
        "prompt_cache_hit": 5184,
        "generation_tokens": 9969,
        "preemptions": 9,
        "finished": 8,
        "ttft": (16, 65.72292566299438),
    },
    # Two engines: 7800 + 6600 tokens, 13 + 11 requests; no process_* series behind two API servers.
    "dp2-metrics-after-load": {
        "generation_tokens": 14400,
        "prompt_computed": 159,
        "finished": 24,
        "start_time": None,
        "ttft": (24, 26.01923656463623 + 22.855863571166992),
    },
    # Before its first request such a server has no gauges at all.
    "dp2-metrics-idle": {"running": None, "generation_tokens": 0},
    "metrics-name-filter": {"running": 0, "kv_usage": 0, "awake": 1, "prompt_computed": 0, "generation_tokens": None},
    "metrics-openmetrics": {"running": 0, "generation_tokens": 0, "start_time": 1795995936.62, "ttft": (0, 0)},
}


@pytest.mark.parametrize("name", sorted(CAPTURED))
def test_a_captured_page_says_what_stands_on_it(name: str, capture: Callable[[str], bytes]) -> None:
    sample = READER.read(capture(name))

    found: dict[str, object] = {**sample.gauges, **sample.counters}
    found |= {quantity: (item.count, item.sum_s) for quantity, item in sample.histograms.items()}
    assert {quantity: found.get(Quantity(quantity)) for quantity in CAPTURED[name]} == {
        quantity: pytest.approx(value) if value is not None else None for quantity, value in CAPTURED[name].items()
    }
    assert sample.rejected == 0


def test_histograms_of_two_recorded_engines_add_by_bucket(capture: Callable[[str], bytes]) -> None:
    page = capture("dp2-metrics-after-load")
    le_0_25 = re.findall(rb'vllm:time_to_first_token_seconds_bucket\{engine="\d",le="0.25",[^}]*\} (\S+)', page)

    histogram = READER.read(page).histograms[Quantity.TTFT]

    assert len(le_0_25) == 2
    assert histogram.cumulative[histogram.bounds_s.index(0.25)] == sum(map(float, le_0_25))
    assert histogram.bounds_s[-1] == math.inf


def test_a_recorded_server_without_statistics_is_no_idle_server(capture: Callable[[str], bytes]) -> None:
    with pytest.raises(PageError, match="statistics off"):
        READER.read(capture("metrics-disable-log-stats"))
