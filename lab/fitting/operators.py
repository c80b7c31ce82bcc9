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

from lab.fitting.architectures import BYTES_PER_VALUE, Architecture
from lab.fitting.curves import fit_line, fit_non_negative, fit_roofline, fit_slope
from lab.fitting.tables import (
    Array,
    Points,
    TableError,
    read_all_reduce,
    read_decode_attention,
    read_gemm,
    read_prefill_attention,
    rows,
)
from simulator.core.timing import IterationModel

_KV_BOUND_TOKENS = 30_000
_LAUNCH_S = 10e-6
"""Element-wise kernels of one layer at one token inside a CUDA graph (LLMServingSim, vLLM 0.19)."""
_BANDWIDTH_SHARE = 0.8
"""Part of the memory's nominal bandwidth that kernels reach (aiconfigurator's specifications)."""
_MAX_TOKENS = 8192
"""Batches above this many tokens are not fitted: no server's budget is larger."""
_EAGER_MESSAGE = 65_536
"""All-reduces of no more elements than this take what their launch takes when the host launches them one by one."""
_EAGER_OPERATORS = 14
"""Operators of a dense layer that the host launches one by one where CUDA graphs are for decoding only and norms and
quantisation are configured as operators of their own: two norms, four quantisations, four products, rotation, writing
KV, attention, activation. Two all-reduces come on top."""
_POWER_OF = "h100_sxm"
_FLOPS = {"bfloat16": "bfloat16_tc_flops", "fp8": "fp8_tc_flops", "nvfp4": "fp4_tc_flops"}
_WIDE_TOKENS = 2048
"""From here on expert layers are bound by computing."""
_MXFP4_BYTES = 0.53
"""Of one weight with its part of a scale."""
_MXFP8_RATIO = 0.5
"""Time of compute-bound expert products with activations in MXFP8 over that in bfloat16, which the table has: twice the
rate (specification)."""
_MARLIN_SYSTEM, _MARLIN_RATE = "l40s", 0.629
"""Marlin, which the H100's table lacks, is what vLLM runs on the L40S, and so what its table has. It uses the
instructions of that generation, which reach some 63 % of the H100's nominal rate (microbenchmarks of Hopper,
arXiv:2402.13499): its time on the H100 is that of the L40S times the ratio of both rates."""


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
    """Whether the server was configured to use CUDA graphs for batches that only decode, and for no part of others."""
    scheduled_ahead: bool = False
    """Whether the server puts an iteration together while the one before runs, so that the host's share is hidden."""


@dataclasses.dataclass(frozen=True, slots=True)
class Correction:
    """What operator tables lack, the same for every replica of a fit."""

    host_s: float = 0.0
    """Host's share of every iteration, where nothing is scheduled ahead."""
    layer_s: float = 0.0
    """Gaps between kernels, each layer."""
    prefill_layer_s: float = 0.0
    """Launches outside CUDA graphs, each layer of an iteration with prefill."""
    seq_s: float = 0.0
    """Host's work for each sequence in an iteration, where nothing is scheduled ahead."""
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
    """Highest part of the H100's nominal FLOPS at which products run for long, since its power is limited; tables are
    measured in short bursts. Of other GPUs see `sustained_share`."""


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorTimes:
    """The parts of an iteration, whole model, without corrections; seconds and seconds per unit."""

    layers: int
    eager_layer_s: float
    """What launching operators one by one adds to a layer of an iteration with prefill."""
    scheduled_ahead: bool
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
        launches_s = correction.prefill_layer_s + self.eager_layer_s
        host_s, host_seq_s = (0.0, 0.0) if self.scheduled_ahead else (correction.host_s, correction.seq_s)
        return IterationModel(
            host_s=host_s + constant_s,
            weights_s=self.weights_s * correction.weights_factor,
            linear_s=self.linear_s * correction.token_factor,
            token_s=self.token_s * correction.token_factor + expert_token_s,
            seq_s=self.seq_s + host_seq_s + expert_token_s,
            kv_token_s=self.kv_token_s * correction.kv_factor,
            attention_pair_s=self.attention_pair_s * correction.token_factor,
            experts_s=self.experts_s * correction.experts_factor,
            expert_share=self.expert_share,
            prefill_s=launches_s * self.layers,
        )


@functools.cache
def specification(perf: Path, system: str) -> dict[str, float]:
    """Bandwidth in bytes a second, FLOPS and the like of one GPU, by its specification. Raises TableError."""
    path = perf / "aiconfigurator" / f"system_{system}.yaml"
    if not path.is_file():
        raise TableError(f"{path}: no such specification")
    gpu: dict[str, float] = yaml.safe_load(path.read_text(encoding="utf-8"))["gpu"]
    return gpu


def sustained_share(perf: Path, system: str, peak_share: float) -> float:
    """Highest part of a GPU's nominal FLOPS at which products run for long, given that of the H100; at most 1.

    The energy of a product is taken to be the same on all of them, and half for half the bits, so that the part grows
    with the power a GPU may draw for its nominal FLOPS. It is above 1 on the A100: its products run as in the tables.
    """
    gpu, reference = specification(perf, system), specification(perf, _POWER_OF)
    dtype = _FLOPS["bfloat16"]
    return min(1.0, peak_share * (gpu["power"] / gpu[dtype]) / (reference["power"] / reference[dtype]))


def _eager_layer_s(perf: Path, system: str, tensor_parallel: int) -> float:
    """Launches of one dense layer, operator by operator; the table of all-reduces has the time of one."""
    small = read_all_reduce(perf, system, max(2, tensor_parallel), eager=True)
    launch_s = float(np.median(small.seconds[small.work <= _EAGER_MESSAGE]))
    return launch_s * (_EAGER_OPERATORS + (2 if tensor_parallel > 1 else 0))


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
        eager_layer_s=_eager_layer_s(perf, system, tp) if deployment.decode_graphs_only else 0.0,
        scheduled_ahead=deployment.scheduled_ahead,
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
        token_s = _expert_token_s(perf, deployment, table)
        weights = 3 * architecture.hidden * architecture.intermediate * architecture.experts / tp
        bandwidth = _BANDWIDTH_SHARE * specification(perf, deployment.system)["mem_bw"]
        share = architecture.experts_per_token / architecture.experts
        found = _Experts(float(seconds[0]), weights * _MXFP4_BYTES / bandwidth, share, token_s)
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


def _expert_token_s(perf: Path, deployment: Deployment, table: Points) -> float:
    """A token's compute-bound time of one expert layer in the kernel that the server runs."""
    marlin = deployment.moe_kernel == "marlin"
    if marlin:
        model, dtype, tp = deployment.architecture.moe_table, deployment.moe_dtype, deployment.tensor_parallel
        table = read_experts(perf, _MARLIN_SYSTEM, model, dtype, tp)
    wide = (table.work >= _WIDE_TOKENS) & (table.work <= _MAX_TOKENS)
    _, token_s = fit_line(Points(table.work[wide], table.seconds[wide]))
    if not marlin:
        return token_s * _MXFP8_RATIO
    flops = _FLOPS["bfloat16"]
    rate = _MARLIN_RATE * specification(perf, deployment.system)[flops]
    return token_s * specification(perf, _MARLIN_SYSTEM)[flops] / rate


def _experts_error(experts: _Experts, m: Array, seconds: Array) -> float:
    predicted = experts.constant_s + experts.all_s * (1 - (1 - experts.share) ** m) + experts.token_s * m
    return float(np.mean(np.abs(predicted / seconds - 1)))


@functools.cache
def read_experts(perf: Path, system: str, model: str, dtype: str, tensor_parallel: int) -> Points:
    """Seconds of one expert layer against tokens, tokens spread by a power law; experts split over the GPUs.

    Raises TableError without rows.
    """
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
