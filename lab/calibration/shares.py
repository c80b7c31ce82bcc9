"""Token Service Share over columns of windows: as `policy_engine.core.pool.tss` has it, for fits that try many weights.

Tests hold both equal, window by window.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from lab.calibration.windows import Bools, Floats, Windows
from lab.evaluation.statistics import Slo
from policy_engine.core.pool.load import FEW_REQUESTS_RPS, outputs_kept
from policy_engine.core.pool.tss import NOTHING_WAITING, waiting_weight_of
from trimtab.config.specs import Slo as SloSpec
from trimtab.config.specs import TokenServiceShare
from trimtab.domain.vocabulary import Role


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """The inputs of the smoothed share. `waiting` is None where it follows from the answers' length."""

    prefill: float
    waiting: float | None
    smoothing: float


@dataclasses.dataclass(frozen=True, slots=True)
class Shares:
    """Of each window: the smoothed share, in idle ones the last known, NaN before there is one; and which are idle.

    Idle: hardly any request and none waiting. Such windows rank as surplus and have no information about the share.
    """

    smoothed_tps: Floats
    idle: Bools


def weights_of(profile: TokenServiceShare) -> Weights:
    """Those of a profile."""
    return Weights(profile.prefill_weight, profile.waiting_weight, profile.smoothing)


def shares(windows: Windows, weights: Weights, slo: Slo, role: Role = Role.COLOCATED) -> Shares:
    """The smoothed share of each window of a role."""
    each = waiting_weights(windows, slo, role) if weights.waiting is None else weights.waiting
    outstanding = windows.running + each * windows.waiting
    prefill = 1.0 if role is Role.PREFILL and weights.prefill == 0 else weights.prefill
    raw = (prefill * windows.prefill_tps + windows.decode_tps) / np.maximum(1.0, outstanding)
    idle = np.asarray((outstanding < 1.0) & (windows.waiting <= NOTHING_WAITING))
    if weights.smoothing == 1.0 and not idle.any():
        return Shares(np.asarray(raw), idle)
    found = np.empty(len(raw))
    previous, run_before = math.nan, -1
    for index, (run, value, rests) in enumerate(zip(windows.run.tolist(), raw.tolist(), idle.tolist(), strict=True)):
        if run != run_before:
            previous, run_before = math.nan, run
        if not rests:
            known = weights.smoothing * value + (1.0 - weights.smoothing) * previous
            previous = value if math.isnan(previous) else known
        found[index] = previous
    return Shares(found, idle)


def waiting_weights(windows: Windows, slo: Slo, role: Role = Role.COLOCATED) -> Floats:
    """What a waiting request counts in each window where the profile leaves it to the length of answers."""
    target = SloSpec(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
    found = np.empty(len(windows))
    tokens_tps, request_rps, run_before, before_s = 0.0, 0.0, -1, 0.0
    columns = (windows.run, windows.end_s, windows.decode_tps, windows.request_rps)
    for index, (run, end_s, tokens, requests) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if not math.isnan(requests):
            kept = 0.0 if run != run_before else outputs_kept(end_s - before_s, requests)
            tokens_tps = kept * tokens_tps + (1.0 - kept) * tokens
            request_rps = kept * request_rps + (1.0 - kept) * requests
        elif run != run_before:
            tokens_tps = request_rps = 0.0
        run_before, before_s = run, end_s
        known = tokens_tps / request_rps if request_rps > FEW_REQUESTS_RPS else None
        found[index] = waiting_weight_of(None, target, role, known)
    return found


def z_of(windows: Windows, profile: TokenServiceShare, slo: Slo, role: Role = Role.COLOCATED) -> Floats:
    """Z of each window of a role."""
    known = shares(windows, weights_of(profile), slo, role)
    z = known.smoothed_tps / profile.theta_tps
    return np.where(known.idle, np.maximum(np.where(np.isnan(z), 0.0, z), profile.surplus_above), z)


def order_of(windows: Windows, profile: TokenServiceShare, slo: Slo, role: Role = Role.COLOCATED) -> Floats:
    """What the arbiter ranks each window by: its Z, and idle ones above every number. NaN before there is a share."""
    known = shares(windows, weights_of(profile), slo, role)
    return np.where(known.idle, np.inf, known.smoothed_tps / profile.theta_tps)
