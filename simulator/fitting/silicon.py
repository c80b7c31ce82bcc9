"""End-to-end measurements of whole replicas (aiconfigurator's silicon samples): reading them and predicting them.

What a row leaves unsaid is taken from how it came about, never from what it measured. Rows with a date are the public
benchmark InferenceX's (SemiAnalysis): its client sends ten requests for each connection, all connections start at
once, lengths are drawn uniformly from 80 to 100 % of the stated ones, and figures are means; its scripts start the
servers with 8,192 tokens a batch, without prefix cache, with KV in fp8 except for gpt-oss on the H100, and run the
experts of gpt-oss by Marlin on the H100 and with activations in MXFP8 on the B200; Llama on the B200 has CUDA graphs
for decoding only. Rows without a date and precision (Qwen3-32B) are aiconfigurator's own, in bfloat16; its benchmark
sends prompts of exactly the stated length. All else is assumed to be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from simulator.core.limits import EngineLimits
from simulator.fitting.architectures import GPT_OSS_120B, LLAMA_3_70B, QWEN_3_32B, Architecture
from simulator.fitting.closed_loop import Latencies, Load, run_closed_loop
from simulator.fitting.operators import Correction, Deployment, operator_times
from simulator.fitting.tables import rows

H100, B200 = "h100_sxm", "b200_sxm"
_MODELS = {"Llama-3.1-70B": LLAMA_3_70B, "Qwen3-32B": QWEN_3_32B, "gpt-oss-120b": GPT_OSS_120B}
_MEMORY_BYTES = {H100: 80 * 2**30, B200: 180 * 2**30}
_MEMORY_SHARE = 0.9
_RUNTIME_BYTES = 4 * 2**30
_WEIGHT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.56}
_BUDGET_TOKENS = 8192
ROUNDS = 10
"""Requests of each client."""
_LEAST_SHARE = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class SiliconRow:
    """One measured point of a replica's load curve."""

    deployment: Deployment
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    measured: Latencies
    date: str
    exact_prompts: bool = False
    """Whether all prompts have the stated length."""
    misrecorded: bool = False
    """Whether `concurrency` is not that of the run: for some days of December 2025 the script for gpt-oss on the H100
    let 512 connections loose on a server with 4 to 64 slots, and wrote down 512. Which server it was nobody wrote down.
    """

    @property
    def saturated(self) -> bool:
        """Whether a mean request waited for its first token a quarter of the time that the others then took."""
        return self.measured.ttft_s > self.output_tokens * self.measured.tpot_s / 4


def read_silicon(perf: Path, system: str) -> list[SiliconRow]:
    """vLLM's rows of Llama, Qwen3 and gpt-oss on one system, prefill and decode together."""
    found = []
    for row in rows(perf / "aiconfigurator" / "silicon_e2e.csv.gz"):
        architecture = _MODELS.get(row["model_path"].rsplit("/", 1)[-1])
        if architecture is None or (row["backend"], row["mode"], row["system"]) != ("vllm", "agg", system):
            continue
        found.append(
            SiliconRow(
                deployment=_deployment(architecture, system, int(row["tp_size"]), row["precision"]),
                concurrency=int(row["concurrency"] or row["batch_size"]),
                prompt_tokens=int(row["isl"]),
                output_tokens=int(row["osl"]),
                measured=Latencies(float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3),
                date=row["measured"],
                exact_prompts=not row["measured"],
                misrecorded=(architecture is GPT_OSS_120B and system == H100 and row["concurrency"] == "512"),
            )
        )
    return found


def _deployment(architecture: Architecture, system: str, tensor_parallel: int, precision: str) -> Deployment:
    if architecture.experts:
        kernel, kv_dtype = ("marlin", "bfloat16") if system == H100 else ("mxfp8", "fp8")
        return Deployment(system, architecture, tensor_parallel, "bfloat16", "w4a16_mxfp4", kv_dtype, kernel)
    dtype = {"": "bfloat16", "fp8": "fp8", "fp4": "nvfp4"}[precision]
    kv_dtype = "fp8" if precision else "bfloat16"
    return Deployment(
        system, architecture, tensor_parallel, dtype, kv_dtype=kv_dtype, decode_graphs_only=system == B200
    )


def engine_limits(row: SiliconRow) -> EngineLimits:
    """The limits of the row's server: KV that fits beside the weights."""
    deployment, architecture = row.deployment, row.deployment.architecture
    weights = architecture.parameters * _WEIGHT_BYTES[deployment.gemm_dtype]
    kv_bytes = architecture.kv_bytes_per_token * (0.5 if deployment.kv_dtype == "fp8" else 1.0)
    kv_bytes *= architecture.full_attention_share
    usable = deployment.tensor_parallel * (_MEMORY_BYTES[deployment.system] * _MEMORY_SHARE - _RUNTIME_BYTES) - weights
    return EngineLimits(
        max_num_batched_tokens=_BUDGET_TOKENS,
        max_num_seqs=1024,
        block_size=16,
        num_gpu_blocks=int(usable / kv_bytes / 16),
        max_model_len=row.prompt_tokens + row.output_tokens,
        enable_prefix_caching=False,
    )


def predict(perf: Path, row: SiliconRow, correction: Correction) -> Latencies:
    """The simulated replica's latencies under the row's load."""
    timing = operator_times(perf, row.deployment, correction.peak_share).model(correction)
    load = Load(
        row.concurrency,
        row.prompt_tokens,
        row.output_tokens,
        ROUNDS,
        _LEAST_SHARE,
        least_prompt_share=1.0 if row.exact_prompts else _LEAST_SHARE,
    )
    return run_closed_loop(engine_limits(row), timing, load, correction.request_s)


def predict_all(perf: Path, table: Sequence[SiliconRow], correction: Correction) -> list[Latencies]:
    """`predict` for every row, in order."""
    return [predict(perf, row, correction) for row in table]
