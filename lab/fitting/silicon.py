"""End-to-end measurements of whole replicas (aiconfigurator's silicon samples): reading them and predicting them.

What a row leaves out is taken from how it was measured, not from its results, but for two facts. Rows with a
date are the public benchmark InferenceX's (SemiAnalysis): its client sends ten requests for each connection, all
connections start at once, lengths are drawn uniformly from 80 to 100 % of the stated ones, and figures are means; its
scripts start the servers with 8,192 tokens a batch, asynchronous scheduling and no prefix cache, with KV in fp8 except
for gpt-oss on the H100, and run the experts of gpt-oss by Marlin on the H100 and with activations in MXFP8 on the
B200; Llama on the B200 has CUDA graphs for decoding only, and norms and quantisation as operators of their own. Rows
without a date and precision (Qwen3-32B, vLLM 0.12, which did not yet schedule ahead) are aiconfigurator's own, in
bfloat16; its benchmark sends lengths of exactly the stated size, two requests of each connection to warm up, and ten
that count. All else is assumed to be the same.

The two facts are of servers on the H100, read off its rows. Llama on two GPUs holds 225,000 tokens of KV by Little's
law, which is what fits in bfloat16 and half of what fits in fp8, so its KV counts as bfloat16. And TTFTs of Qwen3-32B
grow with the clients and not with the length of answers, as they do where one prompt is computed an iteration: its
budget counts as a prompt and a token for each client. The sources state fp8, and 1,500 tokens more (`as_documented`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lab.fitting.architectures import GPT_OSS_120B, LLAMA_3_70B, QWEN_3_32B, Architecture
from lab.fitting.closed_loop import Latencies, Load, run_closed_loop
from lab.fitting.operators import Correction, Deployment, operator_times, sustained_share
from lab.fitting.tables import rows
from simulator.core.limits import EngineLimits

H100, B200 = "h100_sxm", "b200_sxm"
_MODELS = {"Llama-3.1-70B": LLAMA_3_70B, "Qwen3-32B": QWEN_3_32B, "gpt-oss-120b": GPT_OSS_120B}
_MEMORY_BYTES = {H100: 80 * 2**30, B200: 180 * 2**30}
_MEMORY_SHARE = 0.9
_RUNTIME_BYTES = 4 * 2**30
_WEIGHT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.56}
_BUDGET_TOKENS = 8192
ROUNDS = 10
"""Requests of each client."""
_WARM_UP_ROUNDS = 2
_SPARE_TOKENS = 1500
"""What aiconfigurator's generator adds to a prompt and a token for each client, as the budget of a server."""
_TOKENIZER_S = 1e-6
"""A token of a prompt in a tokenizer that does a million a second, as those in Rust do."""
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
    batched_tokens: int = _BUDGET_TOKENS
    """The server's `max_num_batched_tokens`."""
    exact_lengths: bool = False
    """Whether all prompts and answers have the stated lengths."""
    warm_up_rounds: int = 0
    """Requests of each client that are over before those that are measured begin."""
    misrecorded: bool = False
    """Whether `concurrency` is not that of the run: for some days of December 2025 the script for gpt-oss on the H100
    opened 512 connections to a server with 4 to 64 slots, and recorded 512. Which server it was is not recorded.
    """

    @property
    def saturated(self) -> bool:
        """Whether a mean request waited for its first token a quarter of the time that the others then took."""
        return self.measured.ttft_s > self.output_tokens * self.measured.tpot_s / 4


def read_silicon(perf: Path, system: str, *, as_documented: bool = False) -> list[SiliconRow]:
    """vLLM's rows of Llama, Qwen3 and gpt-oss on one system, prefill and decode together; `as_documented` with servers
    as the sources alone have them, without the two facts that are read off the rows.
    """
    spare = _SPARE_TOKENS if as_documented else 0
    found = []
    for row in rows(perf / "aiconfigurator" / "silicon_e2e.csv.gz"):
        architecture = _MODELS.get(row["model_path"].rsplit("/", 1)[-1])
        if architecture is None or (row["backend"], row["mode"], row["system"]) != ("vllm", "agg", system):
            continue
        concurrency = int(row["concurrency"] or row["batch_size"])
        own = not row["measured"]
        found.append(
            SiliconRow(
                deployment=_deployment(architecture, system, int(row["tp_size"]), row["precision"], as_documented),
                concurrency=concurrency,
                prompt_tokens=int(row["isl"]),
                output_tokens=int(row["osl"]),
                measured=Latencies(float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3),
                date=row["measured"],
                batched_tokens=int(row["isl"]) + concurrency + spare if own else _BUDGET_TOKENS,
                exact_lengths=own,
                warm_up_rounds=_WARM_UP_ROUNDS if own else 0,
                misrecorded=(architecture is GPT_OSS_120B and system == H100 and row["concurrency"] == "512"),
            )
        )
    return found


def _deployment(
    architecture: Architecture, system: str, tensor_parallel: int, precision: str, as_documented: bool
) -> Deployment:
    if architecture is GPT_OSS_120B:
        kernel, kv_dtype = ("marlin", "bfloat16") if system == H100 else ("mxfp8", "fp8")
        return Deployment(
            system, architecture, tensor_parallel, "bfloat16", "w4a16_mxfp4", kv_dtype, kernel, scheduled_ahead=True
        )
    dtype = {"": "bfloat16", "fp8": "fp8", "fp4": "nvfp4"}[precision]
    if architecture is QWEN_3_32B:
        return Deployment(system, architecture, tensor_parallel, dtype, kv_dtype="fp8" if precision else "bfloat16")
    return Deployment(
        system,
        architecture,
        tensor_parallel,
        dtype,
        kv_dtype="bfloat16" if system == H100 and not as_documented else "fp8",
        decode_graphs_only=system == B200,
        scheduled_ahead=True,
    )


def engine_limits(row: SiliconRow) -> EngineLimits:
    """The limits of the row's server: KV that fits beside the weights."""
    deployment, architecture = row.deployment, row.deployment.architecture
    weights = architecture.parameters * _WEIGHT_BYTES[deployment.gemm_dtype]
    kv_bytes = architecture.kv_bytes_per_token * (0.5 if deployment.kv_dtype == "fp8" else 1.0)
    kv_bytes *= architecture.full_attention_share
    usable = deployment.tensor_parallel * (_MEMORY_BYTES[deployment.system] * _MEMORY_SHARE - _RUNTIME_BYTES) - weights
    return EngineLimits(
        max_num_batched_tokens=row.batched_tokens,
        max_num_seqs=1024,
        block_size=16,
        num_gpu_blocks=int(usable / kv_bytes / 16),
        max_model_len=row.prompt_tokens + row.output_tokens,
        enable_prefix_caching=False,
    )


def predict(perf: Path, row: SiliconRow, correction: Correction) -> Latencies:
    """The simulated replica's latencies under the row's load."""
    share = sustained_share(perf, row.deployment.system, correction.peak_share)
    timing = operator_times(perf, row.deployment, share).model(correction)
    load = Load(
        row.concurrency,
        row.prompt_tokens,
        row.output_tokens,
        ROUNDS,
        1.0 if row.exact_lengths else _LEAST_SHARE,
        row.warm_up_rounds,
    )
    request_s = correction.request_s + _TOKENIZER_S * row.prompt_tokens
    return run_closed_loop(engine_limits(row), timing, load, request_s, scheduled_ahead=row.deployment.scheduled_ahead)


def predict_all(perf: Path, table: Sequence[SiliconRow], correction: Correction) -> list[Latencies]:
    """`predict` for every row, in order."""
    return [predict(perf, row, correction) for row in table]
