"""Iteration coefficients of one replica (model, precision, tensor parallelism, GPU system) from operator tables.

Everything here is measured per operator, nothing end to end: matrix products, attention, expert layers and
all-reduces of aiconfigurator; element-wise operators by the bytes they move over the memory bandwidth.
What no operator table holds (host, launch gaps, the efficiency of real batches) is a `Correction`, fitted elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import yaml

from simulator.core.timing import IterationModel
from simulator.fitting.architectures import BYTES_PER_VALUE, Architecture
from simulator.fitting.curves import fit_line, fit_non_negative, fit_roofline, fit_slope
from simulator.fitting.tables import (
    Array,
    Points,
    TableError,
    read_all_reduce,
    read_decode_attention,
    read_gemm,
    read_prefill_attention,
    rows,
)

_KV_BOUND_TOKENS = 30_000
_LAUNCH_S = 10e-6
"""Element-wise kernels of one layer at one token inside a CUDA graph (LLMServingSim, vLLM 0.19)."""
_BANDWIDTH_SHARE = 0.8
"""Part of the memory's nominal bandwidth that kernels reach (aiconfigurator's specifications)."""
_MAX_TOKENS = 8192
"""Batches above this many tokens are not fitted: no server's budget is larger."""


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """One replica: a model in one precision on some GPUs of one system."""

    system: str
    architecture: Architecture
    tensor_parallel: int
    gemm_dtype: str = "bfloat16"
    moe_dtype: str = ""
    kv_dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True, slots=True)
class Correction:
    """What operator tables lack, the same for every replica of a fit."""

    host_s: float = 0.0
    """Host's share of every iteration."""
    layer_s: float = 0.0
    """Gaps between kernels, each layer."""
    prefill_layer_s: float = 0.0
    """Launches outside CUDA graphs, each layer of an iteration with prefill."""
    seq_s: float = 0.0
    """Host's and sampler's work for each sequence in an iteration."""
    weights_factor: float = 1.0
    """Real time of the floor of the linear layers over the tables'."""
    experts_factor: float = 1.0
    """Real time of streaming experts over the tables'."""
    token_factor: float = 1.0
    """Real time of a token in compute-bound batches over the tables'."""
    kv_factor: float = 1.0
    """Real time of a KV token read over the tables'."""
    request_s: float = 0.0
    """Time of a request outside the engine: HTTP, tokenizer, first chunk."""


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorTimes:
    """The parts of an iteration, whole model, without corrections; seconds and seconds per unit."""

    layers: int
    weights_s: float
    experts_s: float
    expert_share: float
    linear_s: float
    token_s: float
    constant_s: float
    seq_s: float
    kv_token_s: float
    attention_pair_s: float
    errors: tuple[tuple[str, float], ...]
    """Mean absolute relative errors of the linear part and decode attention."""

    def model(self, correction: Correction) -> IterationModel:
        """The iteration model with a correction."""
        constant_s = self.constant_s + correction.layer_s * self.layers
        return IterationModel(
            host_s=correction.host_s + constant_s,
            weights_s=self.weights_s * correction.weights_factor,
            linear_s=self.linear_s * (correction.weights_factor if self.experts_s else correction.token_factor),
            token_s=self.token_s * correction.token_factor,
            seq_s=self.seq_s + correction.seq_s,
            kv_token_s=self.kv_token_s * correction.kv_factor,
            attention_pair_s=self.attention_pair_s * correction.token_factor,
            experts_s=self.experts_s * correction.experts_factor,
            expert_share=self.expert_share,
            prefill_s=correction.prefill_layer_s * self.layers,
        )


@functools.cache
def memory_bandwidth(perf: Path, system: str) -> float:
    """Bytes a second of one GPU's memory, by its specification."""
    path = perf / "aiconfigurator" / f"system_{system}.yaml"
    if not path.is_file():
        raise TableError(f"{path}: no such specification")
    return float(yaml.safe_load(path.read_text(encoding="utf-8"))["gpu"]["mem_bw"])


@functools.cache
def operator_times(perf: Path, deployment: Deployment) -> OperatorTimes:
    """Read and fit the operator tables; raises TableError when one lacks what is needed."""
    architecture, tp, system = deployment.architecture, deployment.tensor_parallel, deployment.system
    gemm = read_gemm(perf, system, deployment.gemm_dtype)
    m = gemm.m
    dense: Array = np.zeros(len(m))
    for n, k in architecture.layer_gemms(tp):
        dense += gemm.seconds(n, k)
    dense = dense + _elementwise(perf, system, m, architecture, tp)
    reduce_s = 0.0
    if tp > 1:
        reduce_s, slope = fit_line(read_all_reduce(perf, system, tp))
        dense = dense + 2 * slope * m * architecture.hidden
    if architecture.experts:
        experts = read_experts(perf, system, architecture.moe_table, deployment.moe_dtype, tp)
        both = experts.seconds + np.interp(experts.work, m, dense)
        offset, full, share, slope_s, error = _fit_experts(experts.work, both)
        weights = offset
    else:
        full = share = 0.0
        weights, offset, slope_s, error = _fit_linear(m, dense)
    head_gemm = read_gemm(perf, system, "bfloat16")
    head = Points(head_gemm.m, head_gemm.seconds(architecture.vocabulary / tp, architecture.hidden))
    few = head.work <= 256
    head_s, seq_s = fit_line(Points(head.work[few], head.seconds[few]))
    heads, kv_heads = architecture.heads // tp, max(1, architecture.kv_heads // tp)
    decode = read_decode_attention(perf, system, heads, kv_heads, deployment.kv_dtype)
    heavy = decode.work >= _KV_BOUND_TOKENS
    kv_slope = fit_slope(Points(decode.work[heavy], decode.seconds[heavy]))
    kv_error = float(np.mean(np.abs(kv_slope * decode.work[heavy] / decode.seconds[heavy] - 1)))
    pair_slope = fit_slope(read_prefill_attention(perf, system, heads, kv_heads, deployment.kv_dtype))
    few_decode_s = float(np.median(decode.seconds[decode.work <= 256]))
    layers = architecture.layers
    full_attention = layers * architecture.full_attention_share * architecture.head_dim / 128
    return OperatorTimes(
        layers=layers,
        weights_s=layers * weights,
        experts_s=layers * full,
        expert_share=share,
        linear_s=layers * offset,
        token_s=layers * slope_s,
        constant_s=layers * (few_decode_s + 2 * reduce_s) + head_s,
        seq_s=seq_s,
        kv_token_s=full_attention * kv_slope,
        attention_pair_s=full_attention * pair_slope,
        errors=(("linear layers", error), ("decode attention", kv_error)),
    )


def _fit_linear(m: Array, seconds: Array) -> tuple[float, float, float, float]:
    """(floor, offset, slope, error) of max(floor, offset + slope · m), one layer without experts."""
    inside = m <= _MAX_TOKENS
    roofline = fit_roofline(Points(m[inside], seconds[inside]))
    return roofline.floor_s, roofline.offset_s, roofline.slope_s, roofline.error


def _fit_experts(m: Array, seconds: Array) -> tuple[float, float, float, float, float]:
    """(constant, experts, share, slope, error) of constant + experts · (1 - (1 - share)^m) + slope · m, one layer.

    The share is fitted too: tokens do not choose experts evenly, so that fewer are active than chance would have.
    """
    inside = m <= _MAX_TOKENS
    m, seconds = m[inside], seconds[inside]
    best: tuple[float, float, float, float, float] | None = None
    for share in np.geomspace(0.002, 0.3, 40):
        columns = np.stack([np.ones(len(m)), 1 - (1 - share) ** m, m], axis=1)
        constant, full, slope = fit_non_negative(columns, seconds)
        predicted = columns @ np.array([constant, full, slope])
        error = float(np.mean(np.abs(predicted / seconds - 1)))
        if best is None or error < best[-1]:
            best = constant, full, float(share), slope, error
    if best is None:
        raise TableError("a table of expert layers needs at least three batch sizes")
    return best


@functools.cache
def read_experts(perf: Path, system: str, model: str, dtype: str, tensor_parallel: int) -> Points:
    """Seconds of one expert layer against tokens, tokens spread by a power law; experts split over the GPUs."""
    found = {
        int(r["num_tokens"]): float(r["latency"]) / 1e3
        for r in rows(perf / "aiconfigurator" / "moe.csv.gz")
        if r["system"] == system
        and r["model"] == model
        and r["moe_dtype"] == dtype
        and int(r["moe_tp_size"]) == tensor_parallel
        and int(r["moe_ep_size"]) == 1
        and r["distribution"] == "power_law_1.01"
    }
    if not found:
        raise TableError(f"moe.csv.gz has no rows of {model} in {dtype} on {tensor_parallel} GPUs of {system}")
    work, seconds = np.array(sorted(found.items()), float).T
    return Points(work, seconds)


def _elementwise(perf: Path, system: str, m: Array, architecture: Architecture, tensor_parallel: int) -> Array:
    """Element-wise operators of one layer: two fused additions and norms, rotation and activation, by what they move.

    Norms run on every GPU for all of the hidden size; rotation and activation are split.
    """
    intermediate = architecture.intermediate * max(1, architecture.experts_per_token)
    rotated = (architecture.heads + architecture.kv_heads) * architecture.head_dim
    values = 2 * 4 * architecture.hidden + (3 * intermediate + 2 * rotated) / tensor_parallel
    seconds: Array = _LAUNCH_S + m * values * BYTES_PER_VALUE / (_BANDWIDTH_SHARE * memory_bandwidth(perf, system))
    return seconds
