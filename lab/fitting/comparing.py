"""Predicted against measured for one packaged profile: the end-to-end rows of its GPU, model and tensor parallelism."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lab.fitting.correcting import packaged_corrections
from lab.fitting.silicon import B200, H100, read_silicon
from lab.fitting.silicon import predict as predict_row
from lab.fitting.targets import TARGETS


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """One measured load and the model's prediction; seconds."""

    precision: str
    """Of the measured replica; the packaged profile itself is bfloat16."""
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    ttft_measured_s: float
    ttft_predicted_s: float
    tpot_measured_s: float
    tpot_predicted_s: float


def compare_profile(perf: Path, name: str) -> list[Compared]:
    """Rows of the profile's GPU, model and tensor parallelism, in the precision measured, with the fit on that GPU.

    Empty when none was measured; raises TableError when the tables are not there.
    """
    target = next((t for t in TARGETS if t.name == name), None)
    if target is None or target.estimate is not None or target.system not in (H100, B200):
        return []
    correction = packaged_corrections()[target.system]
    found = []
    for row in read_silicon(perf, target.system):
        deployment = row.deployment
        if (deployment.architecture, deployment.tensor_parallel) != (target.architecture, target.tensor_parallel):
            continue
        predicted = predict_row(perf, row, correction)
        found.append(
            Compared(
                precision=deployment.gemm_dtype,
                concurrency=row.concurrency,
                prompt_tokens=row.prompt_tokens,
                output_tokens=row.output_tokens,
                ttft_measured_s=row.measured.ttft_s,
                ttft_predicted_s=predicted.ttft_s,
                tpot_measured_s=row.measured.tpot_s,
                tpot_predicted_s=predicted.tpot_s,
            )
        )
    return found
