"""Does Z keep the order of SLO health, within a model and across models, and better than every raw signal?

`python -m bench.ranks` fits a profile to each of TRE's three models by made-up loads, then runs the seven traces of its
evaluation, which no fit saw, on the static split at two loads and on seeds that no fit used. The health of a window of
5 s is one over the 95th percentile of what its arrivals use of their SLO (`simulator.calibration.windows`). Prints rank
correlations, Spearman's and Kendall's; both forms of the profile are shown, and the shipped one is held to the bars.
`python -m bench.stage_ranks` asks the same of the stages of disaggregated services.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping

import numpy as np

from bench._report import machine, print_bars, put_out
from simulator.calibration.calibrating import Form
from simulator.calibration.fitting import fit_by_answers, fit_fixed, quality
from simulator.calibration.fixed import run_fixed
from simulator.calibration.ranks import kendall, ranks, spearman
from simulator.calibration.shares import z_of
from simulator.calibration.signals import RAW
from simulator.calibration.sweeps import Sweep, fit_windows
from simulator.calibration.windows import Floats, Windows, joined
from simulator.evaluation.bars import at_least
from simulator.suites.capacity import token_cost
from simulator.suites.loads import packaged_loads
from simulator.suites.tre_setup import DURATION_S, HELD_OUT_SEEDS, SLOS, STATIC_SPLIT, profiles
from simulator.traces.probes import MODELS, PROBES, probe
from trimtab.config.specs import TokenServiceShare

LOADS = ("light", "heavy")
"""Of the TRE suite: the static split keeps the SLO for 0.92 and 0.6 of all requests."""
SHIPPED = Form.ANSWERS
WITHIN, ACROSS = 0.9, 0.85
_FITS = {Form.ANSWERS: fit_by_answers, Form.FIXED: fit_fixed}

Ranks = dict[str, float | None]


def unseen(seeds: int) -> dict[str, Windows]:
    """The windows of every trace, by model."""
    known = profiles()
    found: dict[str, list[Windows]] = {model: [] for model in MODELS}
    for seed in HELD_OUT_SEEDS[:seeds]:
        for trace in PROBES:
            for load in LOADS:
                requests = list(probe(trace, seed=seed, rate_scale=packaged_loads().traces[trace][load].rate_scale))
                for model in MODELS:
                    windows = run_fixed(
                        (request for request in requests if request.service == model),
                        profile=known[model],
                        slo=SLOS[model],
                        replicas=STATIC_SPLIT[model],
                        duration_s=DURATION_S,
                    )
                    found[model].append(windows.where(windows.judged))
    return {model: joined(several) for model, several in found.items()}


def ranked(values: Mapping[str, Floats], windows: Mapping[str, Windows]) -> tuple[Ranks, Ranks]:
    """Spearman's and Kendall's correlation of a signal with health, by model and, as `all`, over all models."""
    health = {model: windows[model].health for model in MODELS}
    pairs = {model: (values[model], health[model]) for model in MODELS}
    pairs["all"] = (
        np.concatenate([values[model] for model in MODELS]),
        np.concatenate([health[model] for model in MODELS]),
    )
    known = {name: (first[~np.isnan(first)], second[~np.isnan(first)]) for name, (first, second) in pairs.items()}
    return {name: spearman(*pair) for name, pair in known.items()}, {
        name: kendall(*pair) for name, pair in known.items()
    }


def told_apart(values: Mapping[str, Floats], windows: Mapping[str, Windows]) -> dict[str, float | None]:
    """By another measure of health, over all models: the share of requests within the SLO.

    Most windows have a share of 1 and cannot be ranked by it. `healthy`: how often a window that keeps the SLO ranks
    above one that does not (area under the curve, 0.5 by chance). `lost`: Spearman's correlation with the share where
    it is below 1. Either direction of a signal counts.
    """
    signal = np.concatenate([values[model] for model in MODELS])
    known = ~np.isnan(signal)
    signal = signal[known]
    attained = np.concatenate([windows[model].attained for model in MODELS])[known]
    keeps = np.concatenate([windows[model].pressure for model in MODELS])[known] <= 1.0
    pairs = float(keeps.sum()) * float((~keeps).sum())
    above = float(ranks(signal)[keeps].sum()) - keeps.sum() * (keeps.sum() + 1) / 2.0
    lost = spearman(signal[attained < 1.0], attained[attained < 1.0])
    return {
        "healthy": max(above / pairs, 1.0 - above / pairs) if pairs else None,
        "lost": None if lost is None else abs(lost),
    }


def run(seeds: int) -> dict[str, object]:
    """Everything as one document."""
    known = profiles()
    costs = {model: token_cost(known[model], SLOS[model]) for model in MODELS}
    fits = {model: fit_windows(known[model], SLOS[model], costs[model], Sweep()) for model in MODELS}
    shares: dict[Form, dict[str, TokenServiceShare]] = {
        form: {model: fit(fits[model], SLOS[model]) for model in MODELS} for form, fit in _FITS.items()
    }
    windows = unseen(seeds)
    values: dict[str, dict[str, Floats]] = {
        f"Z ({form})": {model: z_of(windows[model], own[model], SLOS[model]) for model in MODELS}
        for form, own in shares.items()
    }
    values |= {name: {model: of(windows[model]) for model in MODELS} for name, of in RAW.items()}
    signals = {name: ranked(own, windows) for name, own in values.items()}
    z_ranks = signals[f"Z ({SHIPPED})"][0]
    lead = {
        name: None if rank is None else rank - max(abs(signals[raw][0][name] or 0.0) for raw in RAW)
        for name, rank in z_ranks.items()
    }
    bars = [
        at_least("rank_within", {model: z_ranks[model] for model in MODELS}, WITHIN),
        at_least("rank_across", z_ranks["all"], ACROSS),
        at_least("rank_within_above_raw", {model: lead[model] for model in MODELS}, 0.001),
        at_least("rank_across_above_raw", lead["all"], 0.001),
    ]
    return {
        "bench": "ranks",
        "machine": machine(),
        "inputs": {
            "seeds": list(HELD_OUT_SEEDS[:seeds]),
            "loads": list(LOADS),
            "windows": {model: len(windows[model]) for model in MODELS},
            "share_healthy": {model: float(np.mean(windows[model].pressure <= 1.0)) for model in MODELS},
        },
        "profiles": {
            form.value: {model: share.model_dump(by_alias=True) for model, share in own.items()}
            for form, own in shares.items()
        },
        "separation": {
            form.value: {
                model: dataclasses.asdict(quality(windows[model], share, SLOS[model])) for model, share in own.items()
            }
            for form, own in shares.items()
        },
        "spearman": {name: found for name, (found, _) in signals.items()},
        "kendall": {name: found for name, (_, found) in signals.items()},
        "told_apart": {name: told_apart(own, windows) for name, own in values.items()},
        "bars": [bar.document() for bar in bars],
    }


def _print_table(report: Mapping[str, object]) -> None:
    for measure in ("spearman", "kendall"):
        rows = report[measure]
        print(f"{measure:28}" + "".join(f"{name:>12}" for name in (*MODELS, "all")))
        for name, found in rows.items() if isinstance(rows, dict) else ():
            print(f"{name:28}" + "".join(f"{found[key]:12.3f}" for key in (*MODELS, "all")))
        print()
    apart = report["told_apart"]
    print(f"{'by the share within the SLO':28}{'healthy':>12}{'lost':>12}")
    for name, found in apart.items() if isinstance(apart, dict) else ():
        print(f"{name:28}{found['healthy']:12.3f}{found['lost']:12.3f}")
    print()
    separation = report["separation"]
    for form, models in separation.items() if isinstance(separation, dict) else ():
        for model, found in models.items():
            print(
                f"Z ({form}), {model}: within the SLO {found['attained_above']:.3f} of requests where Z ≥ 1, "
                f"{found['attained_below']:.3f} below"
            )
    print_bars(report)


def main() -> int:
    """Print the tables; exit status 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description="rank correlation of Z and raw signals with SLO health")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--seeds", type=int, default=2, choices=range(1, len(HELD_OUT_SEEDS) + 1), help="(default 2)")
    arguments = parser.parse_args()
    report = run(arguments.seeds)
    return put_out(report, as_json=arguments.json, show=_print_table)


if __name__ == "__main__":
    sys.exit(main())
