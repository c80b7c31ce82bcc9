"""Seconds to start, sleep and wake for a model of a given size, from what others measured.

A100 testbed of the TRE paper (7B to 14B models, 14 to 15 GiB of weights a GPU): sleep 1.87 s, first sleep 12.19 s,
wake 1.31 s; a sleeper keeps 1.0 to 1.8 GB a GPU. vLLM's own figures (blog of 2025-10-26, vLLM 0.11, A100): loads of
several sizes, and level-1 sleep and wake of a 30B model (57 GiB on one GPU). Level 2: one measurement of Qwen3-8B.
Between these sizes times are taken to be linear in the weights on one GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lab.fitting.tables import TableError, rows

TRE_SLEEP_S = 1.87
TRE_FIRST_SLEEP_S = 12.19
TRE_WAKE_S = 1.31
_TRE_WEIGHTS_GIB = 15.0

_WEIGHTS_GIB: Mapping[str, float] = {
    "Qwen3-0.6B": 1.4,
    "Qwen3-Coder-30B-A3B-Instruct": 56.9,
    "Qwen3-235B-A22B-Instruct-2507-FP8": 220.0,
}
"""Checkpoint sizes of the models whose loads were measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class LifecycleTimes:
    """Seconds of each transition."""

    start_up_s: float
    first_sleep_s: float
    sleep_s: float
    wake_s: float
    sleep_level2_s: float
    wake_level2_s: float


def _mean(table: list[dict[str, str]], model: str, event: str, level: str) -> float:
    found = [
        float(r["mean_s"])
        for r in table
        if (r["model"], r["event"], r["sleep_level"]) == (model, event, level)
        and r["gpu"] == "A100"
        and r["variant"] in ("", "first sleep incl. host backup")
    ]
    if not found:
        raise TableError(f"no {event} of {model} at level {level} on an A100")
    return float(np.mean(found))


def lifecycle_times(table_path: Path, weights_gib_per_gpu: float, checkpoint_gib: float) -> LifecycleTimes:
    """Times for a model with these weights; raises TableError when the table lacks a row it needs."""
    table = list(rows(table_path))
    sizes = [_WEIGHTS_GIB[m] for m in _WEIGHTS_GIB]
    loads = [_mean(table, m, "load", "none") for m in _WEIGHTS_GIB]
    slope, offset = np.polyfit(sizes, loads, 1)
    coder = "Qwen3-Coder-30B-A3B-Instruct"
    large_gib = _WEIGHTS_GIB[coder]
    share = max(0.0, (weights_gib_per_gpu - _TRE_WEIGHTS_GIB) / (large_gib - _TRE_WEIGHTS_GIB))
    lora = "Qwen3-8B + LoRA"
    return LifecycleTimes(
        start_up_s=round(float(offset + slope * checkpoint_gib), 1),
        first_sleep_s=TRE_FIRST_SLEEP_S,
        sleep_s=round(TRE_SLEEP_S + share * (_mean(table, coder, "sleep", "1") - TRE_SLEEP_S), 2),
        wake_s=round(TRE_WAKE_S + share * (_mean(table, coder, "wake_up", "1") - TRE_WAKE_S), 2),
        sleep_level2_s=_mean(table, lora, "sleep", "2"),
        wake_level2_s=round(_mean(table, lora, "wake_up", "2") * max(1.0, weights_gib_per_gpu / 15.3), 2),
    )
