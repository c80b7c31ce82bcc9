"""Prompt tokens that a server counts at once, spread over the time that their work took."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metrics_collector.core.schema import schema_of
from tests.unit.collector.windows.fleet import OneServer, increase, page, value
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.domain.signals import Counter, Latency

TIMED = schema_of(((Latency.TTFT, (1.0, math.inf)), (Latency.QUEUE, (1.0, math.inf))))


def prefill_rates(server: OneServer, ends: list[float], window_s: float = 5.0) -> list[float]:
    found = [value(server.window(end_s - window_s, end_s), pb.SIGNAL_PREFILL_TPS) for end_s in ends]
    return [math.nan if rate is None else rate for rate in found]


def lump(at: int, tokens: float, *, seconds: float, pages: int) -> list[tuple[float, object]]:
    """One prompt whose first token came at second ``at``, after so many seconds of prefill."""
    return [
        (
            float(at_s),
            page(
                at_s,
                prefill_tokens=tokens if at_s >= at else 0.0,
                prefill_seconds=seconds if at_s >= at else 0.0,
                prefill_requests=1.0 if at_s >= at else 0.0,
            ),
        )
        for at_s in range(pages)
    ]


@pytest.mark.parametrize(
    ("seconds", "rates"),
    [
        # A window of 5 s that holds the step of 4,000 tokens. The step is seen at 10 s.
        (0.5, {9: 0.0, 10: 800.0, 12: 800.0, 14: 800.0, 15: 0.0, 20: 0.0}),
        (4.0, {9: 0.0, 10: 200.0, 11: 400.0, 13: 800.0, 14: 800.0, 15: 600.0, 18: 0.0}),
        (10.0, {9: 0.0, 10: 80.0, 12: 240.0, 14: 400.0, 19: 400.0, 20: 320.0, 24: 0.0}),
        (999.0, {10: pytest.approx(4000 / 60 / 5), 14: pytest.approx(4000 / 60), 29: pytest.approx(4000 / 60)}),
    ],
    ids=["within a scrape", "four seconds", "ten seconds", "at most a minute"],
)
def test_a_long_prompt_flows_at_the_rate_at_which_it_was_worked(seconds: float, rates: dict[int, float]) -> None:
    server = OneServer(*lump(10, 4000, seconds=seconds, pages=30), keep_s=30)  # type: ignore[arg-type]

    found = prefill_rates(server, [float(end_s) for end_s in rates])

    assert dict(zip(rates, found, strict=True)) == {end_s: pytest.approx(rate) for end_s, rate in rates.items()} | {
        end_s: rate for end_s, rate in rates.items() if not isinstance(rate, float)
    }
    assert server.total(Counter.PREFILL_TOKENS) == 4000, "the counter itself is never changed"
    assert increase(server.window(5, 20), Counter.PREFILL_TOKENS) == 4000


def test_without_prefill_times_the_wait_for_the_first_token_less_the_queue_says_how_long_it_took() -> None:
    # TTFT 9 s of which 5 s in the queue: 4 s of work.
    def at(at_s: int) -> tuple[float, object]:
        done = at_s >= 10
        reading = page(at_s, prefill_tokens=4000.0 * done, schema=TIMED)
        for latency, seconds in ((Latency.TTFT, 9.0), (Latency.QUEUE, 5.0)):
            columns = TIMED.histograms[latency]
            row = list(reading.values)
            row[columns.first : columns.sum + 1] = [0.0, float(done), seconds * done]
            reading = reading._replace(values=row)
        return float(at_s), reading

    server = OneServer(*(at(at_s) for at_s in range(20)), keep_s=20)  # type: ignore[arg-type]

    assert prefill_rates(server, [10.0, 13.0, 18.0]) == [200.0, 800.0, 0.0]


def test_a_long_prompt_among_short_ones_is_told_by_its_own_first_token() -> None:
    """Finished requests took 0.1 s each; this one's first token came after 8 s, and no other came meanwhile."""

    def at(at_s: int) -> tuple[float, object]:
        short = min(at_s, 5)
        tokens, first, waited = 100.0 * short, float(short), 0.1 * short
        if at_s >= 13:
            tokens, first, waited = tokens + 32_000, first + 1, waited + 8
        reading = page(
            at_s, prefill_tokens=tokens, prefill_seconds=0.1 * short, prefill_requests=float(short), schema=TIMED
        )
        columns = TIMED.histograms[Latency.TTFT]
        row = list(reading.values)
        row[columns.first : columns.sum + 1] = [float(short), first, waited]
        return float(at_s), reading._replace(values=row)

    server = OneServer(*(at(at_s) for at_s in range(30)), keep_s=20)  # type: ignore[arg-type]

    assert max(prefill_rates(server, [float(end_s) for end_s in range(12, 29)])) == pytest.approx(4000)


def test_a_long_queue_before_short_prompts_does_not_delay_them() -> None:
    """First tokens come after 20 s, nearly all of it in the queue, and a prompt is counted every second."""

    def at(at_s: int) -> tuple[float, object]:
        seconds = 0.2 * at_s
        reading = page(
            at_s, prefill_tokens=1000.0 * at_s, prefill_seconds=seconds, prefill_requests=float(at_s), schema=TIMED
        )
        columns = TIMED.histograms[Latency.TTFT]
        row = list(reading.values)
        row[columns.first : columns.sum + 1] = [0.0, float(at_s), 20.0 * at_s]
        return float(at_s), reading._replace(values=row)

    server = OneServer(*(at(at_s) for at_s in range(12)), keep_s=20)  # type: ignore[arg-type]

    assert prefill_rates(server, [5.0, 11.0]) == [1000.0, 1000.0]


def test_many_short_prompts_are_not_delayed() -> None:
    pages = [
        (float(n), page(n, prefill_tokens=500.0 * n, prefill_seconds=0.5 * n, prefill_requests=5.0 * n))
        for n in range(20)
    ]

    assert prefill_rates(OneServer(*pages, keep_s=20), [5.0, 12.0]) == [500.0, 500.0]


def test_cached_prompt_tokens_cost_no_work_and_are_not_spread() -> None:
    pages = [(float(n), page(n, prefill_cached_tokens=4000.0 * (n >= 3), prefill_seconds=9.0 * n)) for n in range(6)]

    assert value(OneServer(*pages).window(2, 3), pb.SIGNAL_PREFILL_CACHED_TPS) == 4000.0


def test_the_captured_long_prompt_makes_no_spike(material: Path) -> None:
    """vLLM 0.32: 4,000 tokens in chunks over 1.1 s moved the counter from 0 to 4,000 at the first token only."""
    text = (material / "vllm" / "captures" / "lumpy-lumpy-prefill.txt").read_text()
    found = re.findall(r"^t=(\S+) .*?by_source_total\[local_compute\]=(\S+)", text, flags=re.MULTILINE)
    took_s = 1.05
    pages = [
        (
            float(at_s),
            page(
                0,
                prefill_tokens=float(tokens),
                prefill_seconds=took_s * (float(tokens) > 0),
                prefill_requests=float(float(tokens) > 0),
            ),
        )
        for at_s, tokens in found
    ]
    pages += [(1.25 + n / 10, pages[-1][1]) for n in range(20)]
    server = OneServer(*pages, keep_s=3)
    ends = [at_s for at_s, _ in pages[2:]]

    assert float(found[-1][1]) - float(found[-2][1]) == 4000
    assert max(prefill_rates(server, ends, window_s=0.2)) <= 4000 / took_s * (1 + 1e-9)
    assert value(server.window(0.7, 3.2), pb.SIGNAL_PREFILL_TPS) == pytest.approx(4000 / (3.15 - 0.65), rel=0.05)


@settings(deadline=None, max_examples=20)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 40), st.floats(1, 1e5), st.floats(0.01, 80)), max_size=8),
    interval_s=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_over_a_long_run_rates_times_time_are_the_tokens(
    prompts: list[tuple[int, float, float]], interval_s: float
) -> None:
    scrapes = int(160 / interval_s)
    server = OneServer(keep_s=10, rows=24)
    flowed = 0.0
    for n in range(scrapes):
        now_s = n * interval_s
        done = [prompt for prompt in prompts if prompt[0] <= now_s and prompt[0] > 0]
        reading = page(
            n,
            prefill_tokens=sum(tokens for _, tokens, _ in done),
            prefill_seconds=sum(seconds for *_, seconds in done),
            prefill_requests=float(len(done)),
        )
        server.table.put("t", reading, at_s=now_s)
        if n:
            (rate,) = prefill_rates(server, [now_s], window_s=interval_s)
            assert rate >= 0
            flowed += rate * interval_s

    assert flowed == pytest.approx(sum(tokens for at_s, tokens, _ in prompts if at_s > 0), rel=1e-6, abs=1e-6)
