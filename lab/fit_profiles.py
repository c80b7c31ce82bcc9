"""`python -m lab.fit_profiles MATERIAL`: fit the packaged profiles to measured tables and write them.

MATERIAL holds `data/perf` (aiconfigurator, vidur, llmservingsim) and `data/lifecycle`. With `--check` nothing is
written: the command compares what is packaged with a fresh fit and fails when they differ.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
import yaml

import simulator.profiles
from lab.fitting.architectures import LLAMA_3_8B
from lab.fitting.correcting import profile_corrections
from lab.fitting.lifecycle import lifecycle_times
from lab.fitting.operators import Deployment, operator_times, sustained_share
from lab.fitting.overload import (
    Grade,
    HostShare,
    first_gauge_s,
    fit_host_share,
    grade,
    kv_blocks,
    read_gauges,
    replay,
    series_error,
)
from lab.fitting.tables import TableError, read_bench
from lab.fitting.targets import TARGETS, Target
from lab.fitting.timing import TimingFit, cross_check, fit_from_servingsim
from lab.material import MEANING, MaterialError, perf_folder
from simulator.core.limits import EngineLimits
from simulator.core.timing import IterationModel
from simulator.profiles import parse_profile
from trimtab import cli_errors

_MEMORY_SHARE = 0.85
"""Part of a GPU's memory that an awake server takes; the rest is for sleepers on the same GPU."""
_PRO_LIMITS = EngineLimits(
    max_num_batched_tokens=2048, max_num_seqs=128, block_size=16, num_gpu_blocks=33_000, max_model_len=32_768
)
_OPTIONAL = ("experts_s", "expert_share", "prefill_s", "mixed_kv_token_s")
_TRE = "TRE paper (A100-40GB, 7B to 14B models)"
_BLOG = "vLLM blog of 2025-10-26 (vLLM 0.11, A100)"


@dataclasses.dataclass(frozen=True, slots=True)
class HostFit:
    """The host's share of iterations and how well the engine model then reproduces both recorded runs."""

    share: HostShare
    fitted: Grade
    graded: Grade
    running_error: float
    """Of the graded run: mean absolute difference of running requests over their recorded mean."""
    waiting_error: float
    kv_tokens: int
    """KV cache of the graded run's server."""


def fit_host(perf: Path) -> HostFit:
    """Fit on the RTX PRO 6000's run, grade on the RTX 4090's."""
    fitted_on = read_bench(perf, "RTXPRO6000_Llama-3.1-8B")
    timing = fit_from_servingsim(perf, "RTXPRO6000_Llama-3.1-8B_tp1", LLAMA_3_8B).model
    share = fit_host_share(fitted_on, _PRO_LIMITS, timing)
    fitted = grade(fitted_on, replay(fitted_on, _PRO_LIMITS, share.on(timing)).finished)
    graded_on = read_bench(perf, "RTX4090_Llama-3.1-8B")
    gauges = read_gauges(perf, "RTX4090_Llama-3.1-8B")
    first_s = first_gauge_s(graded_on, gauges.running + gauges.waiting)
    blocks = kv_blocks(gauges.kv_usage)
    limits = dataclasses.replace(_PRO_LIMITS, max_num_seqs=256, num_gpu_blocks=blocks)
    other = fit_from_servingsim(perf, "RTX4090_Llama-3.1-8B_tp1", LLAMA_3_8B).model
    run = replay(graded_on, limits, share.on(other), first_s)
    return HostFit(
        share,
        fitted,
        grade(graded_on, run.finished),
        running_error=series_error(run.running, gauges.running),
        waiting_error=series_error(run.waiting, gauges.waiting),
        kv_tokens=limits.kv_capacity_tokens,
    )


def _corrected(perf: Path, target: Target) -> tuple[TimingFit, str]:
    """Operator tables, corrected by what the end-to-end rows of one system showed."""
    moe_dtype = "bfloat16" if target.architecture.experts else ""
    deployment = Deployment(target.system, target.architecture, target.tensor_parallel, moe_dtype=moe_dtype)
    correction = profile_corrections()[target.corrected_on]
    times = operator_times(perf, deployment, sustained_share(perf, target.system, correction.peak_share))
    errors = dict(times.errors)
    if target.vidur_model:
        errors["products of a layer, against vidur"] = cross_check(
            perf, target.system, target.architecture, target.tensor_parallel, target.vidur_model
        )
    text = "aiconfigurator's operator tables; bytes moved for element-wise operators"
    if target.estimate is not None:
        times = target.estimate.scale(times)
        text = f"ESTIMATE by specification, nothing measured: {target.estimate.text}, from {text}"
    text += f"; corrected by aiconfigurator's end-to-end rows of {target.corrected_on}"
    return TimingFit(times.model(correction), errors), text


def _timing(perf: Path, target: Target, host: HostFit) -> tuple[TimingFit, str]:
    if target.corrected_on:
        return _corrected(perf, target)
    fit = fit_from_servingsim(perf, target.system, target.architecture)
    compared = host.fitted if target.system.startswith("RTXPRO") else host.graded
    errors = {f"recorded run, {name}": value for name, value in dataclasses.asdict(compared).items()}
    text = "LLMServingSim's profile of vLLM 0.19; host_s and prefill_s fitted to a recorded run on an RTX PRO 6000"
    return TimingFit(host.share.on(fit.model), {**fit.errors, **errors}), text


def profile_document(perf: Path, lifecycle: Path, target: Target, host: HostFit, today: str) -> dict[str, object]:
    """One profile as the mapping that its YAML file holds."""
    fit, text = _timing(perf, target, host)
    architecture = target.architecture
    weights_gib = architecture.weights_gib / target.tensor_parallel
    kv_cache_gib = target.gpu_memory_gib * _MEMORY_SHARE - weights_gib - target.runtime_gib
    memory_text = f"weights and KV of {architecture.name} in bfloat16; an awake server takes {_MEMORY_SHARE:.0%}"
    if target.kv_cache_of_run:
        kv_cache_gib = host.kv_tokens * architecture.kv_bytes_per_token / 2**30
        memory_text = f"weights of {architecture.name} in bfloat16; KV cache as the recorded run shows it"
    times = lifecycle_times(lifecycle, weights_gib, architecture.weights_gib)
    return {
        "name": target.name,
        "model": target.model,
        "gpu_type": target.gpu_type,
        "tensor_parallel": target.tensor_parallel,
        "timing": {
            **{
                name: _significant(value)
                for name, value in dataclasses.asdict(fit.model).items()
                if value or name not in _OPTIONAL
            },
            "source": {
                "text": text,
                "date": today,
                "fit_error": {name: round(value, 3) for name, value in fit.errors.items()},
            },
        },
        "limits": {
            "max_num_batched_tokens": target.max_num_batched_tokens,
            "max_num_seqs": target.max_num_seqs,
            "block_size": 16,
            "max_model_len": 32768,
        },
        "memory": {
            "weights_gib": round(weights_gib, 2),
            "kv_cache_gib": round(kv_cache_gib, 2),
            "runtime_gib": target.runtime_gib,
            "sleeper_gib": target.sleeper_gib,
            "kv_bytes_per_token": architecture.kv_bytes_per_token,
            "source": {"text": f"{memory_text}; sleeper within the 1.0 to 1.8 GB of the {_TRE}", "date": today},
        },
        "lifecycle": {
            **dataclasses.asdict(times),
            "source": {
                "text": f"sleep and wake of the {_TRE} and, for larger weights, of the {_BLOG}; start-up linear in "
                "the checkpoint's size between its loads; level 2 from Qwen3-8B on an A100",
                "date": today,
            },
        },
        "kv_transfer": {
            "latency_s": 0.005,
            "bytes_per_s": target.link_bytes_per_s,
            "source": {"text": f"{target.link}; latency assumed", "date": today},
        },
    }


def _significant(value: float) -> float:
    return float(f"{value:.4g}")


def documents(material: Path, today: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Every profile's name and document; raises TableError for a missing table, MaterialError for no tables at all."""
    perf = perf_folder(material)
    lifecycle = perf.parent / "lifecycle" / "vllm_sleep_wake_seconds.csv"
    host = fit_host(perf)
    for target in TARGETS:
        yield target.name, profile_document(perf, lifecycle, target, host, today)


_PROFILES = Path(simulator.profiles.__file__).parent

command = typer.Typer(add_completion=False)


@command.command()
def run(
    material: Annotated[Path, typer.Argument(metavar="MATERIAL", help=MEANING)],
    out: Annotated[Path, typer.Option(help="Where the profiles go.")] = _PROFILES,
    check: Annotated[bool, typer.Option("--check", help="Compare only; exit 1 when a profile differs.")] = False,
) -> None:
    """Fit the packaged profiles."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    differing = []
    try:
        for name, document in documents(material, today):
            text = yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True)
            fresh = parse_profile(text, name)
            path = out / f"{name}.yaml"
            if check:
                packaged = parse_profile(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else None
                if packaged is None or packaged.iteration_model() != fresh.iteration_model():
                    differing.append(name)
            else:
                path.write_text(text, encoding="utf-8")
            typer.echo(f"{name}: {_summary(fresh.iteration_model())}")
    except (TableError, MaterialError, OSError) as error:
        typer.echo(f"fit_profiles: {error}", err=True)
        sys.exit(1)
    if differing:
        typer.echo(f"fit_profiles: not current: {', '.join(differing)}", err=True)
        sys.exit(1)


def _summary(model: IterationModel) -> str:
    return (
        f"iteration {1e3 * (model.host_s + model.weights_s):.1f} ms, {1e6 * model.token_s:.1f} us a token, "
        f"{1e9 * model.kv_token_s:.0f} ns a KV token"
    )


if __name__ == "__main__":
    cli_errors.run(command, "fit_profiles")
