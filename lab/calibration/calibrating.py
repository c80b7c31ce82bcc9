"""A calibration from its input to what is reported: fits on one part of the windows, is judged by another."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from lab.calibration.fitting import CalibrationError, Quality, fit_by_answers, fit_fixed, quality
from lab.calibration.signals import raw_qualities
from lab.calibration.stagesweeps import STAGES, stage_capacity, stage_fit_windows, stage_judged_windows
from lab.calibration.sweeps import Sweep, fit_windows, judged_windows
from lab.calibration.windows import Windows
from lab.evaluation.statistics import Slo
from lab.suites.capacity import token_cost
from simulator.core.profile import Profile
from simulator.core.timing import BatchWork
from trimtab.config.specs import TokenServiceShare
from trimtab.domain.vocabulary import Role

RANK_ASKED = 0.9
"""Rank correlation of Z with health within a model."""
FIT_SHARE = 2 / 3
"""The part of each recorded run, from its start, that a fit sees."""


class Form(enum.StrEnum):
    """How a profile weighs waiting requests."""

    ANSWERS = "answers"
    """By the length of answers, as it is at the time."""
    FIXED = "fixed"
    """As the paper does: one weight, found by the fit."""


def form_words(form: Form, role: Role) -> str:
    """How a report calls Z in that form."""
    if role is Role.PREFILL:
        return {Form.ANSWERS: "Z, first tokens", Form.FIXED: "Z, prompt tokens"}[form]
    return {Form.ANSWERS: "Z, waiting by answers", Form.FIXED: "Z, fixed weights"}[form]


@dataclasses.dataclass(frozen=True, slots=True)
class Fitted:
    """A profile with how it ranks the windows that it was fitted to, and those that it never saw."""

    share: TokenServiceShare
    fit: Quality
    judged: Quality


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What came out for one role. `raw` are the raw signals on the windows that no fit saw."""

    role: Role
    source: str
    slo: Slo
    form: Form
    forms: Mapping[Form, Fitted]
    raw: Mapping[str, Quality]

    @property
    def chosen(self) -> Fitted:
        """Of the requested form."""
        return self.forms[self.form]

    @property
    def notes(self) -> tuple[str, ...]:
        """Where a form of Z does not rank as it should, a sentence each; empty where the chosen one leads."""
        known = {name: found.spearman for name, found in self.raw.items() if found.spearman is not None}
        best = max(known, key=lambda name: known[name]) if known else None
        found = []
        for form, fitted in self.forms.items():
            rank, words = fitted.judged.spearman, form_words(form, self.role)
            if rank is None:
                found.append(f"{words}: does not vary on the windows that no fit saw, so it ranks nothing")
            elif best is not None and rank <= known[best]:
                found.append(f"{words}: ranks health no better ({rank:.3f}) than {best} alone ({known[best]:.3f})")
            elif rank < RANK_ASKED:
                found.append(f"{words}: ranks health with {rank:.3f}, below the {RANK_ASKED:g} that is asked for")
        return tuple(found)


def calibrate_profile(profile: Profile, slo: Slo, sweep: Sweep, form: Form = Form.ANSWERS) -> Calibration:
    """From runs of the simulator. Raises `CalibrationError` where no load shows a difference in health."""
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


def calibrate_stages(
    prefill: Profile, decode: Profile, slo: Slo, sweep: Sweep, form: Form = Form.ANSWERS
) -> dict[Role, Calibration]:
    """Both stages of a disaggregated service from runs of the simulator. Raises `CalibrationError`, naming the stage.

    Each stage is fitted to runs of its own replicas, and judged within whole services in which it is the scarce one.
    """
    profiles = {Role.PREFILL: prefill, Role.DECODE: decode}
    try:
        capacities = {role: stage_capacity(profile, slo, role, sweep.search_s) for role, profile in profiles.items()}
    except ValueError as error:
        raise CalibrationError(str(error)) from None
    alone_s = decode.iteration_model().iteration_s(BatchWork(0, 1, 0, 0.0))
    known = {
        Role.PREFILL: {"capacity_prefill_tps": capacities[Role.PREFILL].tokens_tps},
        Role.DECODE: {"capacity_decode_tps": capacities[Role.DECODE].tokens_tps, "base_tpot_s": alone_s},
    }
    counts = " and ".join(str(count) for count in sweep.replicas)
    found: dict[Role, Calibration] = {}
    for role in STAGES:
        fit = stage_fit_windows(profiles[role], slo, capacities[role], sweep)
        try:
            judged = stage_judged_windows(role, profiles, slo, capacities, sweep)
        except ValueError as error:
            raise CalibrationError(str(error)) from None
        own = f"profile {profiles[role].name} of {profiles[role].timing.source.date} as {role}"
        found[role] = _calibrated(
            fit,
            judged,
            slo,
            form,
            source=(
                f"simulator, {own}, {len(fit)} windows of the fit and {len(judged)} others at {counts} replicas, "
                f"seed {sweep.seed}"
            ),
            capacities={name: float(f"{value:.4g}") for name, value in known[role].items()},
            role=role,
        )
    return found


def calibrate_observed(
    windows: Windows, slo: Slo, *, source: str, form: Form = Form.ANSWERS, role: Role = Role.COLOCATED
) -> Calibration:
    """From recorded windows of one role: the first two thirds of each run are fitted to, the rest judges.

    Raises `CalibrationError` where the form needs a length of answers that is not recorded.
    """
    fit, judged = windows.split_in_time(FIT_SHARE)
    if form is Form.ANSWERS and not _knows_answers(fit, role):
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
        role=role,
    )


def _knows_answers(windows: Windows, role: Role) -> bool:
    """A prefill stage's answers are one token each, so that finished requests need not be recorded."""
    return role is Role.PREFILL or bool((windows.request_rps > 0).any())


def _calibrated(
    fit: Windows,
    judged: Windows,
    slo: Slo,
    form: Form,
    *,
    source: str,
    capacities: Mapping[str, float],
    role: Role = Role.COLOCATED,
) -> Calibration:
    forms: dict[Form, Fitted] = {}
    for name, search in ((Form.ANSWERS, fit_by_answers), (Form.FIXED, fit_fixed)):
        if name is Form.ANSWERS and not _knows_answers(fit, role):
            continue
        try:
            share = search(fit, slo, role).model_copy(update=dict(capacities))
        except CalibrationError as error:
            raise error if role is Role.COLOCATED else CalibrationError(f"{role}: {error}") from None
        forms[name] = Fitted(share, quality(fit, share, slo, role), quality(judged, share, slo, role))
    return Calibration(role=role, source=source, slo=slo, form=form, forms=forms, raw=raw_qualities(judged))
