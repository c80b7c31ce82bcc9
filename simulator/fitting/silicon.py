"""End-to-end measurements of whole replicas (aiconfigurator's silicon samples): reading them and predicting them.

What a row leaves unsaid is assumed here, for all rows alike, as the public benchmark that most rows come from does it:
ten requests for each client, all clients start at once, lengths are drawn uniformly from 80 to 100 % of the stated
ones, and the figures are means. Rows without a precision are bfloat16. KV is bfloat16 on Hopper and fp8 on Blackwell.
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
            )
        )
    return found


def _deployment(architecture: Architecture, system: str, tensor_parallel: int, precision: str) -> Deployment:
    kv_dtype = "fp8" if system == B200 else "bfloat16"
    if architecture.experts:
        return Deployment(system, architecture, tensor_parallel, "bfloat16", "w4a16_mxfp4", kv_dtype)
    dtype = {"": "bfloat16", "fp8": "fp8", "fp4": "nvfp4"}[precision]
    return Deployment(system, architecture, tensor_parallel, dtype, "", kv_dtype)


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
    timing = operator_times(perf, row.deployment).model(correction)
    load = Load(row.concurrency, row.prompt_tokens, row.output_tokens, ROUNDS, _LEAST_SHARE)
    return run_closed_loop(engine_limits(row), timing, load, correction.request_s)


def predict_all(perf: Path, table: Sequence[SiliconRow], correction: Correction) -> list[Latencies]:
    """`predict` for every row, in order."""
    return [predict(perf, row, correction) for row in table]
