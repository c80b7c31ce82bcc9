"""Measured tables, read into arrays: GEMM, attention, all-reduce and whole-layer times, all in seconds.

Sources: NVIDIA aiconfigurator (GEMM, attention, all-reduce), Microsoft Vidur (products of a layer, as a cross-check),
LLMServingSim (everything for the two RTX cards, and two runs of a real server).
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class TableError(ValueError):
    """A table is missing or does not hold what is needed; the text names it."""


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Rows of a CSV file, gzipped or not; raises TableError when there is none."""
    if not path.is_file():
        raise TableError(f"{path}: no such table")
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
    else:
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)


@dataclasses.dataclass(frozen=True, slots=True)
class GemmTable:
    """Seconds of bfloat16 products over a grid of m, n and k."""

    m: Array
    n: Array
    k: Array
    log_seconds: Array
    """Shape (m, n, k)."""

    def seconds(self, n: float, k: float) -> Array:
        """Seconds over the table's m: log-linear between grid points, proportional beyond the largest."""
        beyond = max(1.0, n / self.n[-1]) * max(1.0, k / self.k[-1])
        wn = _weights(self.n, min(n, self.n[-1]))
        wk = _weights(self.k, min(k, self.k[-1]))
        logs: Array = np.einsum("mnk,n,k->m", self.log_seconds, wn, wk)
        result: Array = np.exp(logs) * beyond
        return result


def _weights(grid: Array, value: float) -> Array:
    """Weights of grid points that interpolate linearly in the logarithm."""
    weights = np.zeros(len(grid))
    upper = int(np.clip(np.searchsorted(grid, value), 1, len(grid) - 1))
    share = (np.log(value) - np.log(grid[upper - 1])) / (np.log(grid[upper]) - np.log(grid[upper - 1]))
    weights[upper - 1], weights[upper] = 1 - share, share
    return weights


@functools.cache
def read_gemm(perf: Path, system: str, dtype: str = "bfloat16") -> GemmTable:
    """The GEMM table of one GPU system and precision. Raises TableError."""
    found: dict[tuple[int, int, int], float] = {}
    for row in rows(perf / "aiconfigurator" / "gemm.csv.gz"):
        if row["system"] == system and row["gemm_dtype"] == dtype:
            found[int(row["m"]), int(row["n"]), int(row["k"])] = float(row["latency"]) / 1e3
    if not found:
        raise TableError(f"gemm.csv.gz has no {dtype} rows of {system}")
    ms, ns, ks = (sorted({key[axis] for key in found}) for axis in range(3))
    grid = np.full((len(ms), len(ns), len(ks)), np.nan)
    for (m, n, k), seconds in found.items():
        grid[ms.index(m), ns.index(n), ks.index(k)] = np.log(seconds)
    # The largest products are not measured everywhere (memory): there, time grows in proportion to n, or else to m.
    for axis, sizes in ((1, ns), (0, ms)):
        for upper in range(1, len(sizes)):
            here, before = np.take(grid, upper, axis), np.take(grid, upper - 1, axis)
            filled = np.where(np.isnan(here), before + np.log(sizes[upper] / sizes[upper - 1]), here)
            grid[(slice(None),) * axis + (upper,)] = filled
    if np.isnan(grid).any():
        raise TableError(f"gemm.csv.gz has holes in the grid of {system}")
    return GemmTable(np.array(ms, float), np.array(ns, float), np.array(ks, float), grid)


@dataclasses.dataclass(frozen=True, slots=True)
class Points:
    """Measured seconds against an amount of work."""

    work: Array
    seconds: Array


def read_decode_attention(perf: Path, system: str, heads: int, kv_heads: int, kv_dtype: str = "bfloat16") -> Points:
    """Seconds of one layer's decode attention against KV tokens read (batch x context).

    Large batches of tiny contexts are left out: no server sees them, and they pay per sequence, not per token.
    """
    chosen = _nearest_heads(perf / "aiconfigurator" / "generation_attention.csv.gz", system, heads, kv_heads, kv_dtype)
    return _points(
        (int(r["batch_size"]) * (int(r["step"]) + 1), float(r["latency"]) / 1e3)
        for r in chosen
        if int(r["step"]) >= 255 or int(r["batch_size"]) == 1
    )


def read_prefill_attention(perf: Path, system: str, heads: int, kv_heads: int, kv_dtype: str = "bfloat16") -> Points:
    """Seconds of one layer's prefill attention against query-key pairs, prompts of 1,024 tokens and more.

    Where the table has another number of query heads, times are scaled by their ratio.
    """
    chosen = _nearest_heads(perf / "aiconfigurator" / "context_attention.csv.gz", system, heads, kv_heads, kv_dtype)
    scale = heads / int(chosen[0]["num_heads"])
    return _points(
        (int(r["batch_size"]) * int(r["isl"]) ** 2 / 2, float(r["latency"]) / 1e3 * scale)
        for r in chosen
        if int(r["isl"]) >= 1024
    )


@functools.cache
def _nearest_heads(path: Path, system: str, heads: int, kv_heads: int, kv_dtype: str) -> list[dict[str, str]]:
    matching = [
        r
        for r in rows(path)
        if r["system"] == system and r["kv_cache_dtype"] == kv_dtype and int(r["num_key_value_heads"]) == kv_heads
    ]
    if not matching:
        raise TableError(f"{path.name} has no rows of {system} with {kv_heads} KV heads")
    nearest = min({int(r["num_heads"]) for r in matching}, key=lambda h: (abs(h - heads), h))
    return [r for r in matching if int(r["num_heads"]) == nearest]


def _points(pairs: Iterable[tuple[float, float]]) -> Points:
    work, seconds = np.array(sorted(pairs), float).T
    return Points(work, seconds)


def read_all_reduce(perf: Path, system: str, gpus: int, *, eager: bool = False) -> Points:
    """Seconds of vLLM's own all-reduce against elements of the message; within CUDA graphs, or launched one by one."""
    source = "vLLM_custom_eager" if eager else "vLLM_custom_graph"
    return _points(
        (int(r["message_size"]), float(r["latency"]) / 1e3)
        for r in rows(perf / "aiconfigurator" / "custom_allreduce.csv.gz")
        if r["system"] == system and r["kernel_source"] == source and int(r["num_gpus"]) == gpus
    )


_VIDUR_GEMMS = ("attn_pre_proj_ms", "attn_post_proj_ms", "mlp_up_proj_ms", "mlp_down_proj_ms")


def read_vidur(perf: Path, device: str, model: str, tensor_parallel: int) -> Points:
    """One layer's matrix products against tokens. Raises TableError."""
    gemms = [
        (int(row["num_tokens"]), sum(float(row[name]) for name in _VIDUR_GEMMS) / 1e3)
        for row in rows(perf / "vidur" / "mlp_median_ms.csv.gz")
        if (row["device"], row["model"], int(row["tp"])) == (device, model, tensor_parallel)
    ]
    if not gemms:
        raise TableError(f"mlp_median_ms.csv.gz has no rows of {device}, {model}, tp {tensor_parallel}")
    return _points(gemms)


_LEAST_CHUNK = 256
"""Tokens of the shortest prefill chunk that counts as one; shorter ones are bound by their launches."""
_SHARED_CONTEXTS = (1024, 2048)
"""Tokens of context of the decoding sequences beside a chunk: what requests hold in conversations."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServingSimTables:
    """LLMServingSim's profile of one GPU and model."""

    linear: Points
    """All layers against tokens in the batch."""
    per_sequence: Points
    """Output head and sampler against sequences."""
    decode_attention: Points
    """All layers against KV tokens read."""
    prefill_attention: Points
    """All layers against query-key pairs."""
    mixed_attention: Points
    """What decoding sequences add to a prefill chunk in one kernel, all layers, against KV tokens read."""


def read_servingsim(perf: Path, name: str, layers: int) -> ServingSimTables:
    """The tables of `name` (`RTX4090_Llama-3.1-8B_tp1`)."""
    folder = perf / "llmservingsim"
    per_layer = {"qkv_proj": 1, "o_proj": 1, "gate_up_proj": 1, "down_proj": 1, "act_fn": 1, "layernorm": 2}
    counts = {**{k: v * layers for k, v in per_layer.items()}, "rotary_emb": layers, "embedding": 1}
    linear: dict[int, float] = defaultdict(float)
    for row in rows(folder / f"{name}_dense.csv.gz"):
        linear[int(row["tokens"])] += counts.get(row["layer"], 1) * float(row["time_us"]) / 1e6
    sequence: dict[int, float] = defaultdict(float)
    for row in rows(folder / f"{name}_per_sequence.csv.gz"):
        sequence[int(row["sequences"])] += float(row["time_us"]) / 1e6
    decode, mixed = [], []
    alone: dict[tuple[int, int], float] = {}
    for row in rows(folder / f"{name}_attention.csv.gz"):
        chunk, context = int(row["prefill_chunk"]), int(row["kv_prefill"])
        kv_tokens = int(row["n_decode"]) * int(row["kv_decode"])
        seconds = layers * float(row["time_us"]) / 1e6
        if chunk == 0:
            decode.append((kv_tokens, seconds))
        elif chunk >= _LEAST_CHUNK:
            if not kv_tokens:
                alone[chunk, context] = seconds
            elif _SHARED_CONTEXTS[0] <= int(row["kv_decode"]) <= _SHARED_CONTEXTS[1]:
                mixed.append((kv_tokens, chunk, context, seconds))
    return ServingSimTables(
        linear=_points(linear.items()),
        per_sequence=_points(sequence.items()),
        decode_attention=_points(decode),
        prefill_attention=_points((chunk * (context + chunk / 2), s) for (chunk, context), s in alone.items()),
        mixed_attention=_points(
            (kv_tokens, s - alone[chunk, context])
            for kv_tokens, chunk, context, s in mixed
            if s > alone.get((chunk, context), s)
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a recorded run; times in seconds from the first arrival."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    time_to_first_token_s: float
    time_per_output_token_s: float
    ended_s: float


def read_bench(perf: Path, name: str) -> list[BenchRequest]:
    """The requests of a recorded run of a real server, by arrival. Raises TableError."""
    path = perf / "llmservingsim" / f"bench_{name}_requests.jsonl.gz"
    if not path.is_file():
        raise TableError(f"{path}: no such table")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    origin_s = min(float(r["queued_ts"]) for r in records)
    found = []
    for r in records:
        first_s, last_s = float(r["first_token_ts"]), float(r["last_token_ts"])
        found.append(
            BenchRequest(
                arrival_s=float(r["queued_ts"]) - origin_s,
                prompt_tokens=int(r["input_toks"]),
                output_tokens=int(r["output_toks"]),
                time_to_first_token_s=first_s - float(r["queued_ts"]),
                time_per_output_token_s=(last_s - first_s) / max(1, int(r["output_toks"]) - 1),
                ended_s=last_s - origin_s,
            )
        )
    return sorted(found, key=lambda r: r.arrival_s)
