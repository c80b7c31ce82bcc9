"""The scraping bench reports under its bars' names; its figures are for a quiet machine and a long run."""

import json
import math
import subprocess
import sys
from pathlib import Path

from bench.scrape import BARS, filter_page, growth_exponent

ROOT = Path(__file__).resolve().parents[2]


def test_a_tiny_run_reports_every_bar() -> None:
    command = [sys.executable, "-m", "bench.scrape", "--json", "--tiny", "--without-prometheus"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    report = json.loads(done.stdout)
    bars = {bar["name"]: bar for bar in report["bars"]}

    assert list(bars) == list(BARS)
    assert done.returncode == (0 if all(bar["ok"] for bar in bars.values()) else 1)
    for name in ("full_ratio", "filtered_ratio"):
        assert bars[name]["value"] is None
        assert bars[name]["reason"] == "left out by --without-prometheus"
    # So short a run may cost nothing that the process's clock can tell: then there is no growth to see.
    assert math.isfinite(bars["growth_exponent"]["value"])
    assert bars["targets_per_core_1s"]["value"] > 0
    assert bars["extract_speedup"]["value"] > 1
    assert bars["p99_lateness_share"]["value"] >= 0
    assert report["results"]["full"]["collector_scrapes"] > 0
    assert report["results"]["hanging"]["newest_sample_age_p50_s"] < 5
    assert report["inputs"]["page_bytes"] > 3 * report["inputs"]["filtered_page_bytes"]


def test_cost_that_doubles_with_the_targets_grows_with_exponent_one() -> None:
    assert abs(growth_exponent({100: 0.1, 1000: 1.0, 5000: 5.0}) - 1.0) < 1e-9
    assert abs(growth_exponent({10: 1.0, 100: 100.0}) - 2.0) < 1e-9


def test_a_filtered_page_keeps_the_headers_of_what_was_asked_for() -> None:
    page = b'# HELP a A.\n# TYPE a counter\na 1\n# TYPE b histogram\nb_bucket{le="1"} 2\nb_sum 3\n# TYPE c gauge\nc 4\n'

    assert filter_page(page, ["b_bucket"]) == b'# TYPE b histogram\nb_bucket{le="1"} 2\n'
