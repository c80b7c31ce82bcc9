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
_FLOPS = {"bfloat16": "bfloat16_tc_flops", "fp8": "fp8_tc_flops", "nvfp4": "fp4_tc_flops"}
_WIDE_TOKENS = 2048
"""From here on expert layers are bound by computing."""
_MXFP4_BYTES = 0.53
"""Of one weight with its part of a scale."""
_KERNEL_RATIO = {"marlin": 1 / 0.629, "mxfp8": 0.5}
"""Time of compute-bound expert products over that of the table's kernel, for kernels that no table has. Marlin uses
the instructions of the generation before, which reach some 63 % of the H100's rate (microbenchmarks of Hopper,
arXiv:2402.13499); activations in MXFP8 run at twice the rate of bfloat16 (specification)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """One replica: a model in one precision on some GPUs of one system."""

    system: str
    architecture: Architecture
    tensor_parallel: int
    gemm_dtype: str = "bfloat16"
    moe_dtype: str = ""
    kv_dtype: str = "bfloat16"
    moe_kernel: str = ""
    """Of the server, when the table of expert layers was measured with another one."""
    decode_graphs_only: bool = False
    """Whether the server was told to use CUDA graphs for batches that only decode, and for no part of others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Correction:
    """What operator tables lack, the same for every replica of a fit."""

    host_s: float = 0.0
    """Host's share of every iteration."""
    layer_s: float = 0.0
    """Gaps between kernels, each layer."""
    prefill_layer_s: float = 0.0
    """Launches outside CUDA graphs, each layer of an iteration with prefill."""
    eager_layer_s: float = 0.0
    """As much more where CUDA graphs are used for decoding only."""
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
    peak_share: float = 1.0
    """Highest part of the nominal FLOPS at which products run for long; tables are measured in short bursts."""


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorTimes:
    """The parts of an iteration, whole model, without corrections; seconds and seconds per unit."""

    layers: int
    decode_graphs_only: bool
    weights_s: float
    experts_s: float
    expert_share: float
    linear_s: float
    token_s: float
    expert_token_s: float
    """A token's compute-bound part of the expert layers; it counts below the knee of the other layers, too."""
    constant_s: float
    seq_s: float
    kv_token_s: float
    attention_pair_s: float
    errors: tuple[tuple[str, float], ...]
    """Mean absolute relative errors of the linear part and decode attention."""

    def model(self, correction: Correction) -> IterationModel:
        """The iteration model with a correction."""
        constant_s = self.constant_s + correction.layer_s * self.layers
        expert_token_s = self.expert_token_s * correction.token_factor
        launches_s = correction.prefill_layer_s + (correction.eager_layer_s if self.decode_graphs_only else 0.0)
        return IterationModel(
            host_s=correction.host_s + constant_s,
            weights_s=self.weights_s * correction.weights_factor,
            linear_s=self.linear_s * correction.token_factor,
            token_s=self.token_s * correction.token_factor + expert_token_s,
            seq_s=self.seq_s + correction.seq_s + expert_token_s,
            kv_token_s=self.kv_token_s * correction.kv_factor,
            attention_pair_s=self.attention_pair_s * correction.token_factor,
            experts_s=self.experts_s * correction.experts_factor,
            expert_share=self.expert_share,
            prefill_s=launches_s * self.layers,
        )


@functools.cache
def specification(perf: Path, system: str) -> dict[str, float]:
    """Bandwidth in bytes a second, FLOPS and the like of one GPU, by its specification."""
    path = perf / "aiconfigurator" / f"system_{system}.yaml"
    if not path.is_file():
        raise TableError(f"{path}: no such specification")
    gpu: dict[str, float] = yaml.safe_load(path.read_text(encoding="utf-8"))["gpu"]
    return gpu


@functools.cache
def operator_times(perf: Path, deployment: Deployment, peak_share: float = 1.0) -> OperatorTimes:
    """Read and fit the operator tables; raises TableError when one lacks what is needed."""
    architecture, tp, system = deployment.architecture, deployment.tensor_parallel, deployment.system
    m, dense, reduce_s = _dense_layer(perf, deployment, peak_share)
    inside = m <= _MAX_TOKENS
    roofline = fit_roofline(Points(m[inside], dense[inside]))
    experts = _Experts()
    if architecture.experts:
        experts = _fit_experts(perf, deployment)
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
    errors = (("linear layers", roofline.error), ("decode attention", kv_error))
    return OperatorTimes(
        layers=layers,
        decode_graphs_only=deployment.decode_graphs_only,
        weights_s=layers * (roofline.floor_s + experts.constant_s),
        experts_s=layers * experts.all_s,
        expert_share=experts.share,
        linear_s=layers * (roofline.offset_s + experts.constant_s),
        token_s=layers * roofline.slope_s,
        expert_token_s=layers * experts.token_s,
        constant_s=layers * (few_decode_s + 2 * reduce_s) + head_s,
        seq_s=seq_s + layers * roofline.floor_slope_s,
        kv_token_s=full_attention * kv_slope,
        attention_pair_s=full_attention * pair_slope,
        errors=(*errors, ("expert layers", experts.error)) if architecture.experts else errors,
    )


def _dense_layer(perf: Path, deployment: Deployment, peak_share: float) -> tuple[Array, Array, float]:
    """(tokens, seconds of one layer without experts, seconds of an empty all-reduce)."""
    architecture, tp, system = deployment.architecture, deployment.tensor_parallel, deployment.system
    gemm = read_gemm(perf, system, deployment.gemm_dtype)
    m = gemm.m
    flops = peak_share * specification(perf, system)[_FLOPS[deployment.gemm_dtype]]
    dense = _elementwise(perf, system, m, architecture, tp)
    for n, k in architecture.layer_gemms(tp):
        dense = dense + np.maximum(gemm.seconds(n, k), 2 * m * n * k / flops)
    if tp == 1:
        return m, dense, 0.0
    reduce = read_all_reduce(perf, system, tp)
    empty_s = float(reduce.seconds[0])
    return m, dense + 2 * (np.interp(m * architecture.hidden, reduce.work, reduce.seconds) - empty_s), empty_s


@dataclasses.dataclass(frozen=True, slots=True)
class _Experts:
    """seconds = constant + all · (1 - (1 - share)^tokens) + token · tokens, one expert layer."""

    constant_s: float = 0.0
    all_s: float = 0.0
    share: float = 0.0
    token_s: float = 0.0
    error: float = 0.0
    """Mean absolute relative error against the table."""


def _fit_experts(perf: Path, deployment: Deployment) -> _Experts:
    """The expert layers of a deployment.

    The share is fitted, too: tokens do not choose experts evenly, so that fewer are active than chance would have.
    Where the server runs another kernel than the table's, streaming is what the bytes of the experts take, and
    computing is scaled.
    """
    architecture, tp = deployment.architecture, deployment.tensor_parallel
    table = read_experts(perf, deployment.system, architecture.moe_table, deployment.moe_dtype, tp)
    inside = table.work <= _MAX_TOKENS
    m, seconds = table.work[inside], table.seconds[inside]
    if deployment.moe_kernel:
        wide = m >= _WIDE_TOKENS
        _, token_s = fit_line(Points(m[wide], seconds[wide]))
        weights = 3 * architecture.hidden * architecture.intermediate * architecture.experts / tp
        bandwidth = _BANDWIDTH_SHARE * specification(perf, deployment.system)["mem_bw"]
        share = architecture.experts_per_token / architecture.experts
        ratio = _KERNEL_RATIO[deployment.moe_kernel]
        found = _Experts(float(seconds[0]), weights * _MXFP4_BYTES / bandwidth, share, token_s * ratio)
        return dataclasses.replace(found, error=_experts_error(found, m, seconds))
    best: _Experts | None = None
    for share in np.geomspace(0.002, 0.3, 40):
        columns = np.stack([np.ones(len(m)), 1 - (1 - share) ** m, m], axis=1)
        constant, full, slope = fit_non_negative(columns, seconds)
        found = _Experts(constant, full, float(share), slope)
        found = dataclasses.replace(found, error=_experts_error(found, m, seconds))
        if best is None or found.error < best.error:
            best = found
    if best is None:
        raise TableError("a table of expert layers needs at least three batch sizes")
    return best


def _experts_error(experts: _Experts, m: Array, seconds: Array) -> float:
    predicted = experts.constant_s + experts.all_s * (1 - (1 - experts.share) ** m) + experts.token_s * m
    return float(np.mean(np.abs(predicted / seconds - 1)))


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
    seconds: Array = _LAUNCH_S + m * values * BYTES_PER_VALUE / (
        _BANDWIDTH_SHARE * specification(perf, system)["mem_bw"]
    )
    return seconds
