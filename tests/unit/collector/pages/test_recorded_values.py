"""What stands on recorded pages, read off by eye; skipped where there are no recordings."""

import gzip
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from metrics_collector.core.page import PageError, PageReader
from metrics_collector.core.schema import COUNTER_COLUMN, GAUGE_COLUMN, Reading
from trimtab.config.dialects import load_dialects
from trimtab.domain.signals import Latency

Expected = dict[str, float | tuple[float, float] | None]

_ZERO_LATENCIES: Expected = {"ttft": (0, 0), "tbt": (0, 0), "tpot": (0, 0), "queue": (0, 0), "e2e": (0, 0)}
_IDLE: Expected = {
    "running": 0, "waiting": 0, "kv_usage_ratio": 0, "kv_usage_max_ratio": 0, "awake": 1,
    "prefill_tokens": 0, "prefill_cached_tokens": 0, "prompt_tokens": 0, "decode_tokens": 0, "finished": 0,
    "preemptions": 0, "prefix_queries": 0, "prefix_hits": 0, "prefill_seconds": 0, "prefill_requests": 0,
    **_ZERO_LATENCIES,
}  # fmt: skip
# One server with 51 requests behind it, then asleep and awake again.
_STARTED = 1795995433.04
_LOADED: Expected = {
    **_IDLE, "start_time_s": _STARTED, "prefill_tokens": 20128, "prefill_cached_tokens": 11776, "prompt_tokens": 31904,
    "decode_tokens": 9620, "finished": 51, "prefix_queries": 31904, "prefix_hits": 11776,
    "prefill_seconds": 1.8177413400002251, "prefill_requests": 51, "ttft": (51, 72.37943625450134),
    "tbt": (9569, 43.5573334930001), "tpot": (51, 0.23272722180546798), "queue": (51, 67.29958485699933),
    "e2e": (51, 115.94012951850891),
}  # fmt: skip
# A request that was held through a sleep and then aborted: it "waited" and "prefilled" for the time of the sleep.
_ABORTED_ONE: Expected = {
    "prefill_seconds": 807.1736135440002, "prefill_requests": 52, "ttft": (52, 75.42530512809753),
    "e2e": (52, 118.9859983921051),
}  # fmt: skip
_HISTOGRAMS_OF_ONE_SERVER = ("tpot", "queue")


def _but(base: Expected, **values: float | tuple[float, float] | None) -> Expected:
    changed = {**base, **values}
    # Where a page is one of many alike, these two are not read off again.
    return {name: value for name, value in changed.items() if name not in _HISTOGRAMS_OF_ONE_SERVER}


_FLAGS: Expected = _but(_IDLE, start_time_s=1795996061.53)
_UNDER_LOAD: Expected = _but(
    _FLAGS, prefill_tokens=2720, prefill_cached_tokens=2880, prompt_tokens=5600, prefix_queries=5600, prefix_hits=2880,
    finished=2, prefill_seconds=0.05136892500013346, prefill_requests=2, ttft=(10, 1.1046326160430908),
    e2e=(2, 0.12811708450317383),
)  # fmt: skip
_AFTER_LOAD: Expected = _but(
    _FLAGS, prefill_tokens=6912, prefill_cached_tokens=7488, prompt_tokens=14400, prefix_queries=14400,
    prefix_hits=7488, decode_tokens=28808, finished=26, preemptions=57, prefill_seconds=0.8871457050006484,
    prefill_requests=26, ttft=(26, 292.4012670516968), tbt=(28782, 301.07470428600004), e2e=(26, 593.4715747833252),
)  # fmt: skip

CAPTURES: dict[str, Expected] = {
    # Two engines: 7800 + 6600 tokens, 13 + 11 requests. No process_* behind two API servers.
    "dp2-metrics-after-load": _but(
        _IDLE, start_time_s=None, prefill_tokens=159, prompt_tokens=159, decode_tokens=14400, finished=24,
        prefix_queries=159, prefill_seconds=0.6809325040001113 + 1.1108693690007385, prefill_requests=24,
        ttft=(24, 26.01923656463623 + 22.855863571166992), tbt=(14376, 65.23022824200007 + 66.8189540770004),
        e2e=(24, 91.24293446540833 + 89.51990962028503),
    ),
    # Before its first request such a server has no gauges but the one of its sleep.
    "dp2-metrics-idle": {
        **_IDLE, "start_time_s": None, "running": None, "waiting": None, "kv_usage_ratio": None,
        "kv_usage_max_ratio": None,
    },
    "flags-metrics-idle": {**_IDLE, "start_time_s": 1795996061.53},
    "flags-metrics-prefix-hit": _but(
        _FLAGS, prefill_tokens=624, prefill_cached_tokens=576, prompt_tokens=1200, prefix_queries=1200, prefix_hits=576,
        decode_tokens=8, finished=2, prefill_seconds=0.05136892500013346, prefill_requests=2,
        ttft=(2, 0.08422470092773438), tbt=(6, 0.04690410100010922), e2e=(2, 0.12811708450317383),
    ),
    "flags-metrics-under-load-0": _but(
        _UNDER_LOAD, running=6, waiting=18, kv_usage_ratio=0.9119496855345912, kv_usage_max_ratio=0.9119496855345912,
        decode_tokens=3382, tbt=(3372, 13.92612264099921),
    ),
    "flags-metrics-under-load-1": _but(
        _UNDER_LOAD, running=4, waiting=20, kv_usage_ratio=0.9308176100628931, kv_usage_max_ratio=0.9308176100628931,
        decode_tokens=5601, tbt=(5591, 23.14735712400011),
    ),
    "flags-metrics-under-load-2": _but(
        _UNDER_LOAD, running=4, waiting=17, kv_usage_ratio=0.9874213836477987, kv_usage_max_ratio=0.9874213836477987,
        decode_tokens=6504, tbt=(6494, 42.09656259999997), preemptions=4, finished=5,
        prefill_seconds=0.13919452800018917, prefill_requests=5, e2e=(5, 17.765905618667603),
    ),
    "flags-metrics-under-load-3": _but(
        _UNDER_LOAD, running=3, waiting=17, kv_usage_ratio=0.9685534591194969, kv_usage_max_ratio=0.9685534591194969,
        decode_tokens=7842, tbt=(7832, 56.32026583199968), preemptions=6, finished=6,
        prefill_seconds=0.17243034700027238, prefill_requests=6, e2e=(6, 24.572467803955078),
    ),
    "flags-metrics-under-load-4": _but(
        _UNDER_LOAD, running=5, waiting=14, kv_usage_ratio=0.949685534591195, kv_usage_max_ratio=0.949685534591195,
        prefill_tokens=3594, prefill_cached_tokens=3456, prompt_tokens=7050, prefix_queries=7050, prefix_hits=3456,
        decode_tokens=8343, tbt=(8331, 65.20264733699946), preemptions=8, finished=7,
        prefill_seconds=0.22921637000035844, prefill_requests=7, ttft=(12, 21.482298135757446),
        e2e=(7, 34.71616840362549),
    ),
    "flags-metrics-under-load-5": _but(
        _UNDER_LOAD, running=4, waiting=14, kv_usage_ratio=0.9874213836477987, kv_usage_max_ratio=0.9874213836477987,
        prefill_tokens=4616, prefill_cached_tokens=5184, prompt_tokens=9800, prefix_queries=9800, prefix_hits=5184,
        decode_tokens=9969, tbt=(9953, 74.85095809699965), preemptions=9, finished=8,
        prefill_seconds=0.25262952800039784, prefill_requests=8, ttft=(16, 65.72292566299438),
        e2e=(8, 45.75151538848877),
    ),
    "flags-metrics-after-load": _AFTER_LOAD,
    "flags-metrics-after-disconnect": _but(
        _AFTER_LOAD, prefill_tokens=6917, prompt_tokens=14405, prefix_queries=14405, decode_tokens=29160,
        ttft=(27, 292.4086091518402), tbt=(29133, 302.06706477600005),
    ),
    "metrics-idle-fresh": {**_IDLE, "start_time_s": _STARTED},
    "metrics-after-load": _LOADED,
    "metrics-s0-awake": _LOADED,
    "metrics-s1-slept-level1": {**_LOADED, "awake": 0},
    # A request waits at the sleeping server's door, and no gauge shows it.
    "metrics-s2-asleep-with-queued-request": {**_LOADED, "awake": 0},
    "metrics-s3-woken": _but(_LOADED, **_ABORTED_ONE),
    "metrics-s5-partial-wake-weights": _but(_LOADED, awake=0, **_ABORTED_ONE),
    "metrics-s7-slept-level0": _but(_LOADED, awake=0, **_ABORTED_ONE),
    # A pause is no sleep.
    "metrics-p2-paused-keep": _but(_LOADED, **_ABORTED_ONE),
    "metrics-a1-inflight-before-sleep": _but(
        _LOADED, running=3, kv_usage_ratio=0.0007325112928824318, kv_usage_max_ratio=0.0007325112928824318,
        prefill_tokens=20152, prompt_tokens=31928, prefix_queries=31928, decode_tokens=10128,
        prefill_seconds=807.1736135440002, prefill_requests=52, ttft=(55, 75.46579599380493),
        tbt=(10074, 45.60890023699983), e2e=(52, 118.9859983921051),
    ),
    # Three requests more were aborted by the sleep: "success" on the page, not finished here.
    "metrics-a2-after-abort-sleep": _but(
        _LOADED, awake=0, prefill_tokens=20152, prompt_tokens=31928, prefix_queries=31928, decode_tokens=10143,
        prefill_seconds=807.1930162280004, prefill_requests=55, ttft=(55, 75.46579599380493),
        tbt=(10092, 45.74188100000015), e2e=(55, 121.21200752258301),
    ),
    # Frozen: two requests "run" in a server that sleeps.
    "metrics-k1-sleep-keep-inflight": _but(
        _LOADED, awake=0, running=2, kv_usage_ratio=0.0004883408619216212, kv_usage_max_ratio=0.0004883408619216212,
        prefill_tokens=20184, prompt_tokens=31960, prefix_queries=31960, decode_tokens=16406, finished=53,
        prefill_seconds=807.2066736380003, prefill_requests=57, ttft=(59, 75.5301251411438),
        tbt=(16351, 70.65812625600029), e2e=(57, 144.77678108215332),
    ),
    "metrics-after-restart": {**_IDLE, "start_time_s": 1795995936.62},
    "metrics-openmetrics": {**_IDLE, "start_time_s": 1795995936.62},
    # Four families were asked for.
    "metrics-name-filter": {
        **dict.fromkeys(_IDLE), "running": 0, "kv_usage_ratio": 0, "kv_usage_max_ratio": 0, "awake": 1,
        "prefill_tokens": 0, "prefill_cached_tokens": 0, "start_time_s": None,
    },
}  # fmt: skip

OTHERS: dict[str, tuple[str, Expected]] = {
    # Two models' series: 2 + 3 wait. No cache counters: every prompt token counts as computed.
    "vllm_v0_2024-08_kubeai.prom": (
        "vllm-v0",
        {
            "running": 3, "waiting": 5, "kv_usage_ratio": 0.0026235242675994863,
            "kv_usage_max_ratio": 0.0026235242675994863, "awake": None, "start_time_s": 1723656838.94,
            "prefill_tokens": 90, "prefill_cached_tokens": None, "prompt_tokens": 90, "decode_tokens": 2546,
            "finished": 6, "preemptions": 0, "prefix_queries": None, "prefix_hits": None, "prefill_seconds": None,
            "ttft": (9, 0.5106480121612549), "tbt": (2537, 98.35070300102234), "tpot": None, "queue": None,
            "e2e": (6, 93.24844908714294),
        },
    ),
    "vllm_v1_2026_live_cpu_qwen3-0.6b.prom": (
        "vllm-v1",
        _but(
            _IDLE, start_time_s=None, prefill_tokens=18, prompt_tokens=18, decode_tokens=48, finished=3,
            prefix_queries=18, prefill_seconds=1.1050799590000224, prefill_requests=3, ttft=(3, 1.1750445365905762),
            tbt=(45, 4.91046875200027), e2e=(3, 6.068190097808838),
        ),
    ),
    # A cache_hit_rate of 10.61 (percent) is no counter.
    "sglang_2024-11_docs.prom": (
        "sglang",
        {
            "running": 0, "waiting": 0, "kv_usage_ratio": 0.01, "kv_usage_max_ratio": 0.01, "awake": None,
            "start_time_s": None, "prefill_tokens": 506780, "prefill_cached_tokens": None, "prompt_tokens": 506780,
            "decode_tokens": 424549, "finished": None, "preemptions": None, "prefix_hits": None,
            "ttft": (2124, 656.0780844688416), "tbt": (422425, 29846.5393948555), "tpot": None,
            "queue": (2104, 24885.007263183594), "e2e": (2104, 70517.99934530258),
        },
    ),
    "sglang_2026-07_docs.prom": (
        "sglang",
        {
            "running": 162, "waiting": 2826, "kv_usage_ratio": 0.28, "kv_usage_max_ratio": 0.28, "awake": None,
            "start_time_s": None, "prefill_tokens": 8128902, "prefill_cached_tokens": None, "prompt_tokens": 8128902,
            "decode_tokens": 7557572, "finished": None, "preemptions": None, "prefix_hits": None,
            "ttft": (11008, 2351897.9474117756), "tbt": (7400757, 866964.5791549598), "tpot": None, "queue": None,
            "e2e": (11228, 3116093.850019932),
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def reader() -> PageReader:
    return PageReader(load_dialects())


def stands(reading: Reading) -> Expected:
    """A reading by names: numbers, (count, sum) of latencies, None for what is absent."""
    columns = {gauge.value: column for gauge, column in GAUGE_COLUMN.items()}
    columns |= {counter.value: column for counter, column in COUNTER_COLUMN.items()}
    values = reading.values
    found: Expected = {name: None if math.isnan(values[column]) else values[column] for name, column in columns.items()}
    for latency in Latency:
        at = reading.schema.histograms.get(latency)
        absent = at is None or math.isnan(values[at.sum])
        found[latency.value] = None if at is None or absent else (values[at.last], values[at.sum])
    return found


def differences(found: Expected, expected: Expected) -> dict[str, object]:
    return {
        name: (found[name], value)
        for name, value in expected.items()
        if not (
            found[name] is value is None or (None not in (found[name], value) and found[name] == pytest.approx(value))
        )
    }


@pytest.mark.parametrize("name", sorted(CAPTURES))
def test_a_captured_page_of_vllm_says_what_stands_on_it(
    name: str, capture: Callable[[str], bytes], reader: PageReader
) -> None:
    reading, hint = reader.read(capture(name), None)

    assert differences(stands(reading), CAPTURES[name]) == {}
    assert hint.dialect == "vllm-v1"
    assert reading.rejected == 0


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_page_of_another_engine_or_release_says_what_stands_on_it(
    name: str, material: Path, reader: PageReader
) -> None:
    dialect, expected = OTHERS[name]

    reading, hint = reader.read((material / "data" / "metrics" / name).read_bytes(), None)

    assert differences(stands(reading), expected) == {}
    assert hint.dialect == dialect
    assert reading.rejected == 0


def test_every_recorded_page_is_in_these_tables(material: Path) -> None:
    captures = {path.name.removesuffix(".prom.gz") for path in (material / "vllm" / "captures").glob("*.prom.gz")}
    others = {path.name for path in (material / "data" / "metrics").iterdir()}

    assert captures == CAPTURES.keys() | {"metrics-disable-log-stats"}
    assert others == OTHERS.keys()


def test_a_recorded_server_without_statistics_is_no_idle_server(
    capture: Callable[[str], bytes], reader: PageReader
) -> None:
    with pytest.raises(PageError, match="statistics off"):
        reader.read(capture("metrics-disable-log-stats"), None)


def test_histograms_of_two_recorded_engines_add_by_bucket(capture: Callable[[str], bytes], reader: PageReader) -> None:
    reading, _ = reader.read(capture("dp2-metrics-after-load"), None)

    columns = reading.schema.histograms[Latency.TTFT]
    bounds = dict(reading.schema.bounds_s)[Latency.TTFT]
    by_bound = dict(zip(bounds, reading.values[columns.first : columns.last + 1], strict=True))
    assert by_bound[0.25] == 2 + 5
    assert by_bound[5.0] == 13 + 8
    assert by_bound[math.inf] == 13 + 11


def test_any_recorded_page_reads_the_same_whatever_page_came_before(material: Path) -> None:
    pages = [gzip.decompress(path.read_bytes()) for path in sorted((material / "vllm" / "captures").glob("*.prom.gz"))]
    pages += [path.read_bytes() for path in sorted((material / "data" / "metrics").iterdir())]
    pages = [page for page in pages if b"num_r" in page]
    warm = PageReader(load_dialects())
    hints = [warm.read(page, None)[1] for page in pages]

    for page in pages:
        cold = _same(PageReader(load_dialects()).read(page, None)[0])
        assert {_same(warm.read(page, hint)[0]) for hint in hints} == {cold}


def _same(reading: Reading) -> tuple[object, ...]:
    return (reading.schema, tuple(map(repr, reading.values)), reading.rejected)
