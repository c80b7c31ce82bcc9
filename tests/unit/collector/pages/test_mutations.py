"""Thousands of damaged pages: each is refused, or nothing on it is absurd; and none costs time or memory.

tests/long has a hundred thousand more, of recorded pages.
"""

import gc
import math
import random
import time
import tracemalloc
from collections.abc import Callable

import pytest

from metrics_collector.core.page import MAX_LAYOUTS_BYTES, Hint, PageError, PageReader
from metrics_collector.core.schema import COUNTER_COLUMN, GAUGE_COLUMN, Reading
from tests.unit.collector.pages.pagetexts import histogram, series
from trimtab.config.dialects import load_dialects
from trimtab.domain.signals import Counter, Gauge

MUTATIONS = 100_000
# One in so many is of a full page; the others are of pages with the families alone that are read.
FULL_EVERY = 50
VALUES = (b"NaN", b"+Inf", b"-1", b"1e308", b"1e999", b"9" * 400, b"-0.0", b"", b"1_0", b"0x1p3", b"1e-400", b"2.0")
PIECES = (
    b"\n",
    b"}",
    b'"',
    b"{",
    b"\xff",
    b" ",
    b"\\",
    b"# TYPE ",
    b"=",
    b",",
    b"\r",
    b"\t",
    b"_total",
    b"# EOF\n",
    b"\0",
)
_OF_VLLM = (
    "num_requests_running",
    "num_requests_waiting{",
    "kv_cache_usage",
    "engine_sleep_state",
    "generation_tokens_total",
    "prompt_tokens_by_source",
    "prompt_tokens_total",
    "request_success",
    "time_to_first_token_seconds",
)
_OF_OTHERS = ("process_start_time", "sglang:num_", "sglang:generation", "sglang:token_usage", "sglang:time_to_first")
KEPT = tuple(name.encode() for name in (*(f"vllm{mark}{name}" for mark in ":_" for name in _OF_VLLM), *_OF_OTHERS))


Pages = tuple[list[bytes], list[bytes], int]


@pytest.fixture(scope="module", params=["written"])
def pages(vllm_page: Callable[..., bytes]) -> Pages:
    """(pages with the read families alone, full pages, how many mutations of them)."""
    written = written_pages(vllm_page)
    return written, written, MUTATIONS // 5


def written_pages(vllm_page: Callable[..., bytes]) -> list[bytes]:
    """Pages of both engines that no server has shown."""
    ttft = {"0.1": 3.0, "0.5": 9.0, "2.5": 15.0, "+Inf": 16.0}
    return [
        vllm_page(running=4, waiting=14, kv=0.9, generated=9969, computed=4616, cached=5184, finished=8, ttft=ttft),
        (series("sglang:num_running_reqs", {"0": 4}) + histogram("sglang:time_to_first_token_seconds")).encode(),
    ]


def filtered(page: bytes) -> bytes:
    """About what ``?name[]=`` leaves of a page, with one of its histograms."""
    lines = page.splitlines(keepends=True)
    return b"".join(
        line for line in lines if line.removeprefix(b"# TYPE ").startswith(KEPT) and b"_created" not in line
    )


def mutated(page: bytes, others: list[bytes], chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, 3)):
        if len(page) < 2:
            return page
        at = chance.randrange(len(page))
        kind = chance.randrange(8)
        if kind == 0:
            page = page[:at] + bytes([page[at] ^ (1 << chance.randrange(8))]) + page[at + 1 :]
        elif kind == 1:
            page = page[:at] + (b"\n" if chance.random() < 0.7 else b"")
        elif kind == 2:
            page = page[:at] + chance.choice(PIECES) + page[at + chance.randrange(4) :]
        elif kind == 3:
            start, end = line_at(page, at)
            page = page[:end] + page[start:end] + page[end:]
        elif kind == 4:
            (a, b), (c, d) = sorted((line_at(page, at), line_at(page, chance.randrange(len(page)))))
            if b <= c:
                page = page[:a] + page[c:d] + page[b:c] + page[a:b] + page[d:]
        elif kind == 5:
            start, end = line_at(page, at)
            space = page.rfind(b" ", start, end)
            if space > 0:
                page = page[: space + 1] + chance.choice(VALUES) + b"\n" + page[end:]
        elif kind == 6:
            other = chance.choice(others)
            start, _ = line_at(other, chance.randrange(len(other)))
            page = page[: line_at(page, at)[0]] + other[start : start + chance.randrange(2_000)] + page[at:]
        else:
            page = page[:at] + page[at + chance.randrange(1_500) :]
    return page


def line_at(page: bytes, at: int) -> tuple[int, int]:
    end = page.find(b"\n", at)
    return page.rfind(b"\n", 0, at) + 1, len(page) if end < 0 else end + 1


def absurdities(reading: Reading) -> list[str]:
    values = reading.values
    there = [value for value in values if not math.isnan(value)]
    found = [f"{value} is no amount" for value in there if not 0.0 <= value <= 1e17]
    for gauge in (Gauge.KV_USAGE_RATIO, Gauge.KV_USAGE_MAX_RATIO, Gauge.AWAKE):
        if values[GAUGE_COLUMN[gauge]] > 1.0:
            found.append(f"{gauge} above 1")
    if values[GAUGE_COLUMN[Gauge.RUNNING]] > 1e8:
        found.append("more running requests than a server can hold")
    if values[COUNTER_COLUMN[Counter.PREFILL_TOKENS]] > 1e16:
        found.append("prefill tokens")
    if len(values) != reading.schema.width:
        found.append("a row of another width than its schema's")
    for latency, at in reading.schema.histograms.items():
        cumulative = list(values[at.first : at.last + 1])
        absent = [math.isnan(value) for value in (*cumulative, values[at.sum])]
        if any(absent) and not all(absent):
            found.append(f"{latency} partly absent")
        if not any(absent) and cumulative != sorted(cumulative):
            found.append(f"{latency} falls")
    return found


@pytest.mark.timeout(600)
def test_no_damaged_page_crashes_hangs_fills_the_memory_or_gets_anything_absurd_in(
    pages: Pages,
) -> None:
    short, full, mutations = pages
    chance = random.Random(20)
    reader = PageReader(load_dialects())
    hints: list[Hint | None] = []
    for page in short:
        try:
            hints.append(reader.read(page, None)[1])
        except PageError:
            hints.append(None)
    refused = read = 0
    slowest_s = 0.0
    # What other tests have left is not searched for garbage at the reader's expense.
    gc.collect()
    gc.freeze()
    for number in range(mutations):
        place = chance.randrange(len(short))
        page = chance.choice(full) if number % FULL_EVERY == 0 else short[place]
        page = mutated(page, short, chance)
        began = time.thread_time()
        try:
            reading, _ = reader.read(page, hints[place])
        except PageError as error:
            refused += 1
            message = str(error)
            assert message.isprintable()
        else:
            read += 1
            assert absurdities(reading) == [], (number, page)
        slowest_s = max(slowest_s, time.thread_time() - began)
    gc.unfreeze()

    assert refused > mutations / 20
    assert read > mutations / 20
    assert slowest_s < 0.5
    assert reader.layouts_bytes <= MAX_LAYOUTS_BYTES


def test_damaged_pages_leave_no_more_in_memory_than_the_layouts_kept(
    pages: Pages,
) -> None:
    short, _, _ = pages
    chance = random.Random(21)
    reader = PageReader(load_dialects())
    tracemalloc.start()
    try:
        for _ in range(1_500):
            try:
                reader.read(mutated(chance.choice(short), short, chance), None)
            except PageError:
                continue
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    # Numbers and lengths that are looked up are shared by all readers, and bounded by themselves.
    assert held < 2 * reader.layouts_bytes + 16 * 1024 * 1024
