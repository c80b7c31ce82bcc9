"""Fits the `Correction` of one system's replicas to the end-to-end rows of that system alone.

Least squares of the logarithms of predicted over measured TTFT and TPOT, each row simulated; large errors count
linearly, not by their square, so that single runs that went wrong do not rule. A weak prior keeps factors near one and
times near zero where the rows do not determine them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from lab.fitting.operators import Correction
from lab.fitting.silicon import SiliconRow, predict_all
from lab.fitting.tables import Array

_TIMES = ("host_s", "layer_s", "prefill_layer_s", "seq_s", "request_s")
_UNITS = (1e-3, 10e-6, 20e-6, 10e-6, 10e-3)
"""What is a usual size of each of the times."""
_FACTORS = ("weights_factor", "experts_factor", "token_factor", "kv_factor", "peak_share")
_USUAL = (1.0, 1.0, 1.0, 1.0, 0.8)
"""The factors where no row determines them. 80 % of the nominal rate is what products in bfloat16 reach in the
H100's tables."""
_USUAL_TIMES = (0.5, 0.0, 0.5, 0.5, 0.5)
_TIME_SPREADS = (3.0, 0.5, 3.0, 3.0, 3.0)
"""In their units; what kernels of a layer leave between them inside a CUDA graph is a few microseconds."""
_FACTOR_SPREADS = (0.5, 0.5, 0.5, 0.5, 0.15)
_MOST_CLIENTS = 16
"""Rows of more clients take most of the time to simulate and add little."""
_LINEAR_BEYOND = 0.1
_STEP = 0.1
_HALVINGS = 6
_DECIMALS = 9


@functools.cache
def packaged_corrections() -> dict[str, Correction]:
    """The fitted corrections that come with the simulator, by the system they were fitted on."""
    return _read_corrections("corrections.yaml")


@functools.cache
def profile_corrections() -> dict[str, Correction]:
    """The corrections that the packaged profiles were made with, by the system they were fitted on: an earlier fit,
    kept since what suites and studies chose (loads, shares, thresholds) was chosen with those profiles.
    """
    return _read_corrections("profile_corrections.yaml")


def _read_corrections(name: str) -> dict[str, Correction]:
    text = importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return {system: Correction(**values) for system, values in yaml.safe_load(text).items()}


def corrections_document(corrections: dict[str, Correction]) -> str:
    """The text of `corrections.yaml`."""
    head = (
        "# Written by `python -m bench.fidelity --refit`; each fitted to the end-to-end rows of its own system alone.\n"
    )
    values = {
        system: {name: round(value, _DECIMALS) for name, value in dataclasses.asdict(one).items()}
        for system, one in corrections.items()
    }
    return head + yaml.safe_dump(values, sort_keys=False)


def correction_of(values: Array) -> Correction:
    """The correction of the fitted variables: times in their units, then logarithms of factors."""
    times = {name: max(0.0, float(v)) * unit for name, unit, v in zip(_TIMES, _UNITS, values, strict=False)}
    logs = values[len(_TIMES) :]
    factors = {n: usual * math.exp(float(v)) for n, usual, v in zip(_FACTORS, _USUAL, logs, strict=True)}
    return Correction(**times, **factors)


def log_errors(perf: Path, table: Sequence[SiliconRow], correction: Correction) -> Array:
    """Logarithms of predicted over measured, shape (rows, 2): TTFT, TPOT."""
    predicted = predict_all(perf, table, correction)
    return np.array(
        [
            (math.log(p.ttft_s / r.measured.ttft_s), math.log(p.tpot_s / r.measured.tpot_s))
            for p, r in zip(predicted, table, strict=True)
        ]
    )


def fit_correction(perf: Path, table: Sequence[SiliconRow], rounds: int = 12) -> Correction:
    """Fit to those of these rows that have at most 32 clients, by reweighted Gauss-Newton steps; a step that does not
    help is halved.
    """
    table = [row for row in table if row.concurrency <= _MOST_CLIENTS]
    prior = np.concatenate([np.array(_USUAL_TIMES), np.zeros(len(_FACTORS))])
    spread = np.array([*_TIME_SPREADS, *_FACTOR_SPREADS])
    values = prior.copy()
    errors = log_errors(perf, table, correction_of(values)).ravel()
    cost = _cost(errors, values, prior, spread)
    for _ in range(rounds):
        slopes = np.stack(
            [
                (log_errors(perf, table, correction_of(values + _STEP * one)).ravel() - errors) / _STEP
                for one in np.eye(len(values))
            ],
            axis=1,
        )
        weights = 1 / np.sqrt(np.maximum(1.0, np.abs(errors) / _LINEAR_BEYOND)) / _LINEAR_BEYOND
        matrix = np.concatenate([slopes * weights[:, None], np.diag(1 / spread)])
        target = np.concatenate([-errors * weights, (prior - values) / spread])
        step, *_ = np.linalg.lstsq(matrix, target, rcond=None)
        for _ in range(_HALVINGS):
            trial = values + step
            trial[: len(_TIMES)] = np.maximum(0.0, trial[: len(_TIMES)])
            found = log_errors(perf, table, correction_of(trial)).ravel()
            if _cost(found, trial, prior, spread) < cost:
                break
            step = step / 2
        else:
            break
        better = cost - _cost(found, trial, prior, spread)
        values, errors, cost = trial, found, cost - better
        if better < 1e-3 * cost:
            break
    return correction_of(values)


def _cost(errors: Array, values: Array, prior: Array, spread: Array) -> float:
    size = np.abs(errors) / _LINEAR_BEYOND
    loss = np.where(size < 1, size**2 / 2, size - 0.5)
    return float(loss.sum() + (((values - prior) / spread) ** 2).sum() / 2)
