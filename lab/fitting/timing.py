"""Iteration coefficients of a card that LLMServingSim profiled, part by part, and how two tables of products agree.

The output head runs once per sequence: its share that does not depend on the batch joins the constant part. Decode
attention reads KV, prefill attention computes pairs, and where both share a kernel, KV is read more slowly. The host's
share of iterations is in no table; it is fitted to a recorded run of a real server (`lab.fitting.overload`) and
added by the caller.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from lab.fitting.architectures import Architecture
from lab.fitting.curves import fit_line, fit_roofline, fit_slope, relative_error, thin
from lab.fitting.tables import (
    Array,
    GemmTable,
    Points,
    read_gemm,
    read_servingsim,
    read_vidur,
)
from simulator.core.timing import IterationModel

_KV_BOUND_TOKENS = 30_000
"""Above this many KV tokens a layer, decode attention is bound by memory on every GPU of the tables."""
_VIDUR_DEVICES = {"a100_sxm": "a100", "h100_sxm": "h100"}


@dataclasses.dataclass(frozen=True, slots=True)
class TimingFit:
    """Coefficients without the host's share, and the errors of their fits as fractions."""

    model: IterationModel
    errors: dict[str, float]


def cross_check(perf: Path, system: str, architecture: Architecture, tensor_parallel: int, model: str) -> float:
    """Mean relative difference of one layer's products, aiconfigurator's against Vidur's, from 1 to 4,096 tokens."""
    gemm = read_gemm(perf, system)
    layer = _layer_gemms(gemm, architecture, tensor_parallel)
    gemms = read_vidur(perf, _VIDUR_DEVICES[system], model, tensor_parallel)
    inside = gemms.work <= 4096
    measured = Points(gemms.work[inside], gemms.seconds[inside])
    return relative_error(np.interp(measured.work, gemm.m, layer), measured)


def fit_from_servingsim(perf: Path, name: str, architecture: Architecture) -> TimingFit:
    """Coefficients of a model on a card that LLMServingSim profiled."""
    tables = read_servingsim(perf, name, architecture.layers)
    long = tables.prefill_attention.work >= 1024**2 / 2
    prefill = Points(tables.prefill_attention.work[long], tables.prefill_attention.seconds[long])
    fit = _combine(thin(tables.linear), tables.per_sequence, tables.decode_attention, prefill)
    bound = tables.mixed_attention.work >= _KV_BOUND_TOKENS
    mixed = Points(tables.mixed_attention.work[bound], tables.mixed_attention.seconds[bound])
    # The median: what is left of a long chunk's time is at times almost nothing, and would rule a fit.
    mixed_slope = float(np.median(mixed.seconds / mixed.work))
    model = dataclasses.replace(fit.model, mixed_kv_token_s=max(0.0, mixed_slope - fit.model.kv_token_s))
    return TimingFit(model, {**fit.errors, "mixed attention": relative_error(mixed_slope * mixed.work, mixed)})


def _combine(linear: Points, head: Points, decode: Points, prefill: Points) -> TimingFit:
    """Coefficients from whole-model times: linear layers by tokens, head by sequences, attention by KV and pairs."""
    roofline = fit_roofline(linear)
    head_s, seq_s = fit_line(head)
    bound = decode.work >= _KV_BOUND_TOKENS
    # Small batches pay the head's weights and attention's kernels whatever they hold; the slope counts what is above.
    kernels_s = float(np.median(decode.seconds[decode.work <= 256]))
    heavy = Points(decode.work[bound], decode.seconds[bound] - kernels_s)
    kv_slope = fit_slope(heavy)
    pair_slope = fit_slope(prefill)
    constant_s = head_s + kernels_s
    model = IterationModel(
        host_s=0.0,
        weights_s=roofline.floor_s + constant_s,
        linear_s=roofline.offset_s + constant_s,
        token_s=roofline.slope_s,
        seq_s=seq_s + roofline.floor_slope_s,
        kv_token_s=kv_slope,
        attention_pair_s=pair_slope,
    )
    errors = {
        "linear layers": roofline.error,
        "decode attention": relative_error(kv_slope * heavy.work, heavy),
        "prefill attention": relative_error(pair_slope * prefill.work, prefill),
    }
    return TimingFit(model, errors)


def _layer_gemms(gemm: GemmTable, architecture: Architecture, tensor_parallel: int) -> Array:
    total: Array = np.zeros(len(gemm.m))
    for n, k in architecture.layer_gemms(tensor_parallel):
        total += gemm.seconds(n, k)
    return total
