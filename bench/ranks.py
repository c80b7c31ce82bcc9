"""Does Z keep the order of SLO health, within a model and across models, and better than every raw signal?

`python -m bench.ranks` fits a profile to each of TRE's three models by made-up loads, then runs the seven traces of its
evaluation, which no fit saw, at fixed capacity: the static split, two loads a trace, seeds that no fit used. A window
of 5 s has as its health one over the 95th percentile of what its arrivals use of their SLO
(`lab.calibration.windows`). Prints rank correlations, Spearman's and Kendall's, of both forms of the profile, the
shipped one held to the bars, and of raw signals. Z ranks as it does for the arbiter: an idle window above every number.

Two designs. `own`, which the bars are of, is TRE's: each model has loads of its own, from health to trouble
(`lab.calibration.ranges`). `joint` has the suite's loads, at which the split over all models together keeps the
SLO for so many requests; a model may be in health nearly throughout there. In both, *all raw signals together* is the
health of their nearest neighbours on a training seed of the same traces: how much the signals of a window hold.
`python -m bench.stage_ranks` does the same for the stages of disaggregated services.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bench._report import machine, print_bars, put_out
from lab.calibration.calibrating import Form
from lab.calibration.fitting import fit_by_answers, fit_fixed, quality
from lab.calibration.fixed import run_fixed
from lab.calibration.ranges import TARGETS, packaged_ranges, requests_of
from lab.calibration.ranks import kendall, ranks, spearman
from lab.calibration.shares import order_of, z_of
from lab.calibration.signals import RAW, all_together
from lab.calibration.sweeps import Sweep, fit_windows
from lab.calibration.windows import Bools, Floats, Windows, joined
from lab.evaluation.bars import at_least
from lab.suites.capacity import token_cost
from lab.suites.loads import packaged_loads
from lab.suites.tre_setup import DURATION_S, HELD_OUT_SEEDS, SLOS, STATIC_SPLIT, TRAINING_SEEDS, profiles
from simulator.traces.probes import MODELS, PROBES
from trimtab.config.specs import TokenServiceShare

SHIPPED = Form.ANSWERS
WITHIN, ACROSS = 0.9, 0.85
_FITS = {Form.ANSWERS: fit_by_answers, Form.FIXED: fit_fixed}
JUDGED = "own"
DESIGNS: Mapping[str, Callable[[str, str, str], float]] = {
    JUDGED: lambda model, trace, load: packaged_ranges()[model][trace][load].rate_scale,
    "joint": lambda _, trace, load: packaged_loads().traces[trace][load].rate_scale,
}
"""The factor on a trace's rates, from (model, trace, load)."""
TOGETHER = "all raw signals together"

Ranks = dict[str, float | None]
Shares = Mapping[Form, Mapping[str, TokenServiceShare]]


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """All windows of one model, with the trace and the seed that each is of."""

    windows: Windows
    traces: NDArray[np.str_]
    seeds: NDArray[np.int64]

    def where(self, chosen: Bools) -> Seen:
        """Some of the windows."""
        return Seen(self.windows.where(chosen), self.traces[chosen], self.seeds[chosen])


def seen(design: str, seeds: Sequence[int]) -> dict[str, Seen]:
    """The windows of every trace at both loads, by model; those without arrivals too."""
    known = profiles()
    found: dict[str, Seen] = {}
    for model in MODELS:
        runs: list[tuple[Windows, str, int]] = []
        for seed in seeds:
            for trace in PROBES:
                for load in TARGETS:
                    windows = run_fixed(
                        requests_of(model, trace, seed=seed, rate_scale=DESIGNS[design](model, trace, load)),
                        profile=known[model],
                        slo=SLOS[model],
                        replicas=STATIC_SPLIT[model],
                        duration_s=DURATION_S,
                    )
                    runs.append((windows, trace, seed))
        found[model] = Seen(
            joined([windows for windows, _, _ in runs]),
            np.concatenate([np.full(len(windows), trace) for windows, trace, _ in runs]),
            np.concatenate([np.full(len(windows), seed) for windows, _, seed in runs]),
        )
    return found


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


def among(values: Mapping[str, Floats], windows: Mapping[str, Windows], chosen: Mapping[str, Bools]) -> Ranks:
    """Spearman's correlation by model among the `chosen` windows only; None where there are too few, or all alike."""
    found: Ranks = {}
    for model in MODELS:
        some = chosen[model] & ~np.isnan(values[model])
        found[model] = spearman(values[model][some], windows[model].health[some])
    return found


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


def fitted() -> dict[Form, dict[str, TokenServiceShare]]:
    """Both forms of each model's profile, from made-up loads."""
    known = profiles()
    costs = {model: token_cost(known[model], SLOS[model]) for model in MODELS}
    fits = {model: fit_windows(known[model], SLOS[model], costs[model], Sweep()) for model in MODELS}
    return {form: {model: fit(fits[model], SLOS[model]) for model in MODELS} for form, fit in _FITS.items()}


def signals(windows: Mapping[str, Windows], shares: Shares) -> dict[str, dict[str, Floats]]:
    """Every signal of all windows: both forms of Z, the shipped one as a number too, and the raw ones."""
    values = {
        f"Z ({form})": {model: order_of(windows[model], own[model], SLOS[model]) for model in MODELS}
        for form, own in shares.items()
    }
    # Idle windows keep the last share there, at least `surplus_above`.
    values[f"Z ({SHIPPED}), as a number"] = {
        model: z_of(windows[model], shares[SHIPPED][model], SLOS[model]) for model in MODELS
    }
    return values | {name: {model: of(windows[model]) for model in MODELS} for name, of in RAW.items()}


def by_design(design: str, shares: Shares, seeds: Sequence[int]) -> tuple[dict[str, Ranks], dict[str, object]]:
    """(Spearman's correlations by signal, the document) of one design."""
    everything = seen(design, seeds)
    known = {model: one.windows.judged for model, one in everything.items()}
    values = {
        name: {model: own[model][known[model]] for model in MODELS}
        for name, own in signals({model: one.windows for model, one in everything.items()}, shares).items()
    }
    judged = {model: one.where(known[model]) for model, one in everything.items()}
    windows = {model: one.windows for model, one in judged.items()}
    before = {model: one.windows for model, one in seen(design, TRAINING_SEEDS[:1]).items()}
    values[TOGETHER] = {
        model: all_together(before[model].where(before[model].judged), windows[model]) for model in MODELS
    }
    both = {name: ranked(own, windows) for name, own in values.items()}
    healthy = {model: windows[model].pressure <= 1.0 for model in MODELS}
    order = values[f"Z ({SHIPPED})"]
    found = {name: rank for name, (rank, _) in both.items()}
    return found, {
        "windows": {model: len(windows[model]) for model in MODELS},
        "share_healthy": {model: float(np.mean(healthy[model])) for model in MODELS},
        "spearman": found,
        "kendall": {name: tau for name, (_, tau) in both.items()},
        "spearman_healthy": {name: among(own, windows, healthy) for name, own in values.items()},
        "z_by_trace": {
            trace: among(order, windows, {model: judged[model].traces == trace for model in MODELS}) for trace in PROBES
        },
        "z_by_seed": {
            str(seed): among(order, windows, {model: judged[model].seeds == seed for model in MODELS}) for seed in seeds
        },
        "told_apart": {name: told_apart(own, windows) for name, own in values.items()},
        "separation": {
            form.value: {
                model: dataclasses.asdict(quality(windows[model], share, SLOS[model])) for model, share in own.items()
            }
            for form, own in shares.items()
        },
    }


def run(seeds: int) -> dict[str, object]:
    """Everything as one document."""
    shares = fitted()
    designs = {design: by_design(design, shares, HELD_OUT_SEEDS[:seeds]) for design in DESIGNS}
    return {
        "bench": "ranks",
        "machine": machine(),
        "inputs": {"seeds": list(HELD_OUT_SEEDS[:seeds]), "loads": dict(TARGETS), "judged_by": JUDGED},
        "profiles": {
            form.value: {model: share.model_dump(by_alias=True) for model, share in own.items()}
            for form, own in shares.items()
        },
        "designs": {design: document for design, (_, document) in designs.items()},
        "bars": bars(designs[JUDGED][0]),
    }


def bars(spearmans: Mapping[str, Ranks]) -> list[dict[str, object]]:
    """The bars of the shipped form, from correlations by signal."""
    z_ranks = spearmans[f"Z ({SHIPPED})"]
    lead = {
        name: None if rank is None else rank - max(abs(spearmans[raw][name] or 0.0) for raw in RAW)
        for name, rank in z_ranks.items()
    }
    asked = (
        at_least("rank_within", {model: z_ranks[model] for model in MODELS}, WITHIN),
        at_least("rank_across", z_ranks["all"], ACROSS),
        at_least("rank_within_above_raw", {model: lead[model] for model in MODELS}, 0.001),
        at_least("rank_across_above_raw", lead["all"], 0.001),
    )
    return [bar.document() for bar in asked]


def _print_table(report: Mapping[str, object]) -> None:
    designs = report["designs"]
    for design, found in designs.items() if isinstance(designs, dict) else ():
        healthy = ", ".join(f"{share:.2f}" for share in found["share_healthy"].values())
        print(f"design {design}: windows {', '.join(map(str, found['windows'].values()))}, in health {healthy}\n")
        for measure in ("spearman", "kendall"):
            print_ranks(measure, found[measure], (*MODELS, "all"))
        print_ranks("spearman in health", found["spearman_healthy"], MODELS)
        print_ranks("Z by trace", found["z_by_trace"], MODELS)
        print_ranks("Z by seed", found["z_by_seed"], MODELS)
        print_ranks("by the share within the SLO", found["told_apart"], ("healthy", "lost"))
        for form, models in found["separation"].items():
            for model, own in models.items():
                print(
                    f"Z ({form}), {model}: within the SLO {own['attained_above']:.3f} of requests where Z ≥ 1, "
                    f"{own['attained_below']:.3f} below"
                )
        print()
    print_bars(report)


def print_ranks(title: str, rows: Mapping[str, Mapping[str, float | None]], columns: Sequence[str]) -> None:
    """A table of correlations, a row a signal."""
    print(f"{title:28}" + "".join(f"{name:>12}" for name in columns))
    for name, found in rows.items():
        cells = (found[key] for key in columns)
        print(f"{name:28}" + "".join(f"{'—' if cell is None else f'{cell:.3f}':>12}" for cell in cells))
    print()


def main() -> int:
    """Print the tables; exit status 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description="rank correlation of Z and raw signals with SLO health")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, len(HELD_OUT_SEEDS) + 1), help="(default 3)")
    arguments = parser.parse_args()
    report = run(arguments.seeds)
    return put_out(report, as_json=arguments.json, show=_print_table)


if __name__ == "__main__":
    sys.exit(main())
