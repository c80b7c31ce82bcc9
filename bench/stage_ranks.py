"""Does each stage's Z keep the order of its own stage's health in disaggregated services, within and across models?

`python -m bench.stage_ranks` fits a profile to prefill and to decode of each of TRE's three models, each stage by
made-up loads on its own. Then services of both roles serve traces of TRE's evaluation that no fit saw, on a number of
replicas that stays. Prefill's health is by the time to its token, decode's by the time per token and the wait for the
first (`lab.calibration.watching`). Prints rank correlations of each stage's Z, in both forms, and of raw signals.

Two designs, as in `bench.ranks`. `own`, which the bars are of: the stage has one replica, the other one enough, and
each trace two loads, at which the stage keeps its part of the SLO for so many requests, found on a training seed.
`uses`: as many replicas of both stages as the trace's mean work needs at two levels of use, where a stage may be in
health throughout. Where Z does not lead, the last lines say so.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench._report import machine, print_bars, put_out
from bench.ranks import Ranks, print_ranks, ranked
from lab.calibration.calibrating import Form, form_words
from lab.calibration.fitting import fit_by_answers, fit_fixed, quality
from lab.calibration.fixed import run_staged
from lab.calibration.ranges import TARGETS, requests_of
from lab.calibration.shares import order_of
from lab.calibration.signals import RAW
from lab.calibration.stagesweeps import STAGES, StageCapacity, stage_capacity, stage_fit_windows
from lab.calibration.sweeps import Sweep
from lab.calibration.windows import Floats, Windows, joined
from lab.evaluation.bars import Bar, at_least
from lab.suites.loads import packaged_loads, scale_for
from lab.suites.tre_setup import DURATION_S, HELD_OUT_SEEDS, SLOS, TRAINING_SEEDS, profiles
from simulator.traces.model import TraceRequest
from simulator.traces.probes import MODELS, PROBES, probe
from trimtab.config.specs import TokenServiceShare
from trimtab.domain.vocabulary import Role

USES = (0.55, 0.85)
"""Mean work of the trace over what the replicas of a stage carry."""
RATE_SCALE = 1.5
"""Beside the suite's heavy load: a stage is a part of the work, and one replica of it would often do."""
WITHIN, ACROSS = 0.9, 0.85
AMPLE_USE = 0.35
"""Of the stage that is not judged, where each is judged over a range of its own."""
JUDGED = "own"
_TOLERANCE = 0.03
QUICK = Sweep(replicas=(1,), repeats=1, duration_s=270.0, search_s=30.0)
_FITS = {Form.ANSWERS: fit_by_answers, Form.FIXED: fit_fixed}
_DOWN = -1.0

Stages = dict[Role, dict[str, Windows]]
Capacities = Mapping[str, Mapping[Role, StageCapacity]]


def over_own_ranges(capacities: Capacities, traces: Sequence[str], seeds: int) -> tuple[Stages, list[str]]:
    """The windows of every trace by stage and model, each stage at loads that take it from health to trouble.

    And what is left out, with the reason: traces that no load has a stage serve as it should.
    """
    found: Stages = {role: {} for role in STAGES}
    left_out: list[str] = []
    for role in STAGES:
        for model in MODELS:
            several: list[Windows] = []
            for trace in traces:
                try:
                    scales = own_scales(functools.partial(attained, role, model, trace, capacities))
                except ValueError as error:
                    left_out.append(f"{role} of {model} on {trace}: {error}")
                    continue
                for scale in scales:
                    for seed in HELD_OUT_SEEDS[:seeds]:
                        windows = alone(role, model, trace, seed, scale, capacities)
                        several.append(windows.where(windows.judged))
            found[role][model] = joined(several)
    return found, left_out


def own_scales(attainment: Callable[[float], float]) -> list[float]:
    """The factors on a trace's rates at which the stage keeps its part of the SLO for the `TARGETS`, lightest first."""
    found: list[float] = []
    for target in TARGETS.values():
        scale, _ = scale_for(attainment, target, start=found[-1] if found else 1.0, tolerance=_TOLERANCE)
        found.append(scale)
    return found


def alone(role: Role, model: str, trace: str, seed: int, scale: float, capacities: Capacities) -> Windows:
    """The windows of a stage of one replica, with enough of the other stage."""
    requests = list(requests_of(model, trace, seed=seed, rate_scale=scale))
    counts = replicas(requests, capacities[model], AMPLE_USE) | {role: 1}
    profile = profiles()[model]
    return run_staged(
        requests,
        prefill=profile,
        decode=profile,
        slo=SLOS[model],
        prefill_replicas=counts[Role.PREFILL],
        decode_replicas=counts[Role.DECODE],
        duration_s=DURATION_S,
    )[role]


def attained(role: Role, model: str, trace: str, capacities: Capacities, scale: float) -> float:
    """The share of the requests of a training seed that a stage of one replica serves within its part of the SLO."""
    windows = alone(role, model, trace, TRAINING_SEEDS[0], scale, capacities)
    judged = windows.where(windows.judged)
    return float(np.average(judged.attained, weights=judged.requests))


def at_uses(capacities: Capacities, traces: Sequence[str], seeds: int, uses: Sequence[float]) -> Stages:
    """The windows of every trace by stage and model, on replicas by the trace's mean work."""
    known = profiles()
    found: dict[Role, dict[str, list[Windows]]] = {role: {model: [] for model in MODELS} for role in STAGES}
    for seed in HELD_OUT_SEEDS[:seeds]:
        for trace in traces:
            scale = RATE_SCALE * packaged_loads().traces[trace]["heavy"].rate_scale
            requests = list(probe(trace, seed=seed, rate_scale=scale))
            for model in MODELS:
                own = [request for request in requests if request.service == model]
                for use in uses:
                    counts = replicas(own, capacities[model], use)
                    windows = run_staged(
                        own,
                        prefill=known[model],
                        decode=known[model],
                        slo=SLOS[model],
                        prefill_replicas=counts[Role.PREFILL],
                        decode_replicas=counts[Role.DECODE],
                        duration_s=DURATION_S,
                    )
                    for role in STAGES:
                        found[role][model].append(windows[role].where(windows[role].judged))
    return {role: {model: joined(several) for model, several in own.items()} for role, own in found.items()}


def replicas(requests: Sequence[TraceRequest], capacities: Mapping[Role, StageCapacity], use: float) -> dict[Role, int]:
    """As many of each stage as the mean work of the trace needs at that use; one at least."""
    tokens = {
        Role.PREFILL: sum(request.prompt_tokens for request in requests),
        Role.DECODE: sum(request.output_tokens for request in requests),
    }
    return {
        role: max(1, math.ceil(total / DURATION_S / capacities[role].tokens_tps / use))
        for role, total in tokens.items()
    }


def rows(
    role: Role, windows: Mapping[str, Windows], shares: Mapping[Form, Mapping[str, TokenServiceShare]]
) -> dict[str, tuple[Ranks, Ranks]]:
    """Spearman's and Kendall's correlation of every signal of a stage, the shipped form of Z first."""
    values: dict[str, Mapping[str, Floats]] = {
        form_words(form, role): {model: order_of(windows[model], own[model], SLOS[model], role) for model in MODELS}
        for form, own in shares.items()
    }
    values |= {name: {model: of(windows[model]) for model in MODELS} for name, of in RAW.items()}
    return {name: ranked(own, windows) for name, own in values.items()}


def run(traces: Sequence[str], seeds: int, *, quick: bool) -> dict[str, object]:
    """Everything as one document."""
    known, sweep, uses = profiles(), QUICK if quick else Sweep(repeats=1), USES[-1:] if quick else USES
    capacities = {
        model: {role: stage_capacity(known[model], SLOS[model], role, sweep.search_s) for role in STAGES}
        for model in MODELS
    }
    shares = {
        role: fitted(
            {model: stage_fit_windows(known[model], SLOS[model], capacities[model][role], sweep) for model in MODELS},
            role,
        )
        for role in STAGES
    }
    own, left_out = over_own_ranges(capacities, traces, seeds)
    designs = {JUDGED: own, "uses": at_uses(capacities, traces, seeds, uses)}
    ranks = {
        design: {role: rows(role, windows[role], shares[role]) for role in STAGES}
        for design, windows in designs.items()
    }
    return {
        "bench": "stage_ranks",
        "machine": machine(),
        "inputs": {
            "seeds": list(HELD_OUT_SEEDS[:seeds]),
            "traces": list(traces),
            "loads": dict(TARGETS),
            "uses": list(uses),
            "quick": quick,
            "judged_by": JUDGED,
            "left_out": left_out,
        },
        "profiles": {
            role.value: {
                form.value: {model: share.model_dump(by_alias=True, exclude_none=True) for model, share in own.items()}
                for form, own in shares[role].items()
            }
            for role in STAGES
        },
        "designs": {
            design: {role.value: document(role, windows[role], shares[role], ranks[design][role]) for role in STAGES}
            for design, windows in designs.items()
        },
        "bars": [bar.document() for role in STAGES for bar in bars(role, ranks[JUDGED][role])],
    }


def fitted(fits: Mapping[str, Windows], role: Role) -> dict[Form, dict[str, TokenServiceShare]]:
    """Both forms of a stage's profile, by model."""
    return {form: {model: fit(fits[model], SLOS[model], role) for model in MODELS} for form, fit in _FITS.items()}


def bars(role: Role, found: Mapping[str, tuple[Ranks, Ranks]]) -> list[Bar]:
    """The bars of a stage's shipped form."""
    shipped = found[form_words(Form.ANSWERS, role)][0]
    lead = {
        name: (_DOWN if rank is None else rank) - max(abs(found[raw][0][name] or 0.0) for raw in RAW)
        for name, rank in shipped.items()
    }
    return [
        at_least(f"{role}_rank_within", {model: shipped[model] for model in MODELS}, WITHIN),
        at_least(f"{role}_rank_across", shipped["all"], ACROSS),
        at_least(f"{role}_rank_within_above_raw", {model: lead[model] for model in MODELS}, 0.001),
        at_least(f"{role}_rank_across_above_raw", lead["all"], 0.001),
    ]


def document(
    role: Role,
    windows: Mapping[str, Windows],
    shares: Mapping[Form, Mapping[str, TokenServiceShare]],
    found: Mapping[str, tuple[Ranks, Ranks]],
) -> dict[str, object]:
    """What comes out for one stage by one design."""
    return {
        "windows": {model: len(windows[model]) for model in MODELS},
        "share_healthy": {model: float(np.mean(windows[model].pressure <= 1.0)) for model in MODELS},
        "separation": {
            form.value: {
                model: dataclasses.asdict(quality(windows[model], share, SLOS[model], role))
                for model, share in own.items()
            }
            for form, own in shares.items()
        },
        "spearman": {name: both[0] for name, both in found.items()},
        "kendall": {name: both[1] for name, both in found.items()},
    }


def _print_tables(report: Mapping[str, object]) -> None:
    designs = report["designs"]
    for design, stages in designs.items() if isinstance(designs, dict) else ():
        for role, stage in stages.items():
            _print_stage(f"design {design}, {role}", Role(role), stage)
    inputs = report["inputs"]
    for line in inputs["left_out"] if isinstance(inputs, dict) else ():
        print(f"left out: {line}")
    print_bars(report)


def _print_stage(title: str, role: Role, stage: Mapping[str, dict[str, dict[str, Any]]]) -> None:
    said = ", ".join(f"{model} {count}" for model, count in stage["windows"].items())
    healthy = ", ".join(f"{share:.2f}" for share in stage["share_healthy"].values())
    print(f"{title}: windows {said}; share that keeps its SLO {healthy}")
    for measure in ("spearman", "kendall"):
        print_ranks(measure, stage[measure], (*MODELS, "all"))
    for form, models in stage["separation"].items():
        for model, found in models.items():
            print(f"{form_words(Form(form), role)}, {model}: wrong side of Z = 1 {found['misjudged']:.3f}")
    print()


def main() -> int:
    """Print the tables; exit status 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description="rank correlation of each stage's Z with its own SLO health")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--seeds", type=int, default=1, choices=range(1, len(HELD_OUT_SEEDS) + 1), help="(default 1)")
    parser.add_argument("--traces", default=",".join(PROBES), help="names with commas between them (default all seven)")
    parser.add_argument("--quick", action="store_true", help="shorter fits, and the higher use alone")
    arguments = parser.parse_args()
    traces = arguments.traces.split(",")
    unknown = [trace for trace in traces if trace not in PROBES]
    if unknown:
        parser.error(f"--traces: {unknown[0]!r} is not one of {', '.join(PROBES)}")
    report = run(traces, arguments.seeds, quick=arguments.quick)
    return put_out(report, as_json=arguments.json, show=_print_tables)


if __name__ == "__main__":
    sys.exit(main())
