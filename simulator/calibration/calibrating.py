"""A calibration from its input to what is reported: fits on one part of the windows, is judged by another."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from simulator.calibration.fitting import CalibrationError, Quality, fit_by_answers, fit_fixed, quality
from simulator.calibration.signals import raw_qualities
from simulator.calibration.sweeps import Sweep, fit_windows, judged_windows
from simulator.calibration.windows import Windows
from simulator.core.profile import Profile
from simulator.core.timing import BatchWork
from simulator.evaluation.statistics import Slo
from simulator.suites.capacity import token_cost
from trimtab.config.specs import TokenServiceShare

FIT_SHARE = 2 / 3
"""The part of each recorded run, from its start, that a fit sees."""


class Form(enum.StrEnum):
    """How a profile weighs waiting requests."""

    ANSWERS = "answers"
    """By the length of answers, as it is at the time."""
    FIXED = "fixed"
    """As the paper does: one weight, found by the fit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """A profile with how it ranks the windows that it was fitted to, and those that it never saw."""

    share: TokenServiceShare
    fit: Quality
    judged: Quality


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What came out. `raw` are the raw signals on the windows that no fit saw."""

    source: str
    slo: Slo
    form: Form
    forms: Mapping[Form, Fitted]
    raw: Mapping[str, Quality]

    @property
    def chosen(self) -> Fitted:
        """Of the form that was asked for."""
        return self.forms[self.form]


def calibrate_profile(profile: Profile, slo: Slo, sweep: Sweep, form: Form = Form.ANSWERS) -> Calibration:
    """From runs of the simulator. Raises `CalibrationError` where no load tells."""
    try:
        cost = token_cost(profile, slo)
    except ValueError as error:
        raise CalibrationError(str(error)) from None
    fit = fit_windows(profile, slo, cost, sweep)
    judged = judged_windows(profile, slo, cost, sweep)
    alone_s = profile.iteration_model().iteration_s(BatchWork(0, 1, 0, 0.0))
    counts = " and ".join(str(count) for count in sweep.replicas)
    return _calibrated(
        fit,
        judged,
        slo,
        form,
        source=(
            f"simulator, profile {profile.name} of {profile.timing.source.date}, {len(fit)} windows of the fit and "
            f"{len(judged)} others at {counts} replicas, seed {sweep.seed}"
        ),
        capacities={
            "capacity_prefill_tps": float(f"{1.0 / cost.prompt_token_s:.4g}"),
            "capacity_decode_tps": float(f"{1.0 / cost.output_token_s:.4g}"),
            "base_tpot_s": float(f"{alone_s:.4g}"),
        },
    )


def calibrate_observed(windows: Windows, slo: Slo, *, source: str, form: Form = Form.ANSWERS) -> Calibration:
    """From recorded windows: the first two thirds of each run are fitted to, the rest judges."""
    fit, judged = windows.split_in_time(FIT_SHARE)
    if form is Form.ANSWERS and not (windows.request_rps > 0).any():
        raise CalibrationError(
            f"{source}: without request_rps the length of answers is not known: record it, or ask for --form fixed"
        )
    return _calibrated(
        fit,
        judged,
        slo,
        form,
        source=f"{source}, {len(fit)} windows of the fit and {len(judged)} others",
        capacities={},
    )


def _calibrated(
    fit: Windows, judged: Windows, slo: Slo, form: Form, *, source: str, capacities: Mapping[str, float]
) -> Calibration:
    forms: dict[Form, Fitted] = {}
    for name, search in ((Form.ANSWERS, fit_by_answers), (Form.FIXED, fit_fixed)):
        if name is Form.ANSWERS and not (fit.request_rps > 0).any():
            continue
        share = search(fit, slo).model_copy(update=dict(capacities))
        forms[name] = Fitted(share, quality(fit, share, slo), quality(judged, share, slo))
    return Calibration(source=source, slo=slo, form=form, forms=forms, raw=raw_qualities(judged))
