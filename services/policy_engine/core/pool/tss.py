"""Token Service Share (TRE, section III): what each request of a service gets, on one scale for all services.

    raw      = (w_p · prefill_tps + decode_tps) / max(1, running + w_q · waiting)
    smoothed = α · raw + (1 − α) · previous
    Z        = smoothed / θ

Z below 1 is a deficit: 0.5 means half of what a request needs to meet its SLO. Waiting requests are those queued in
servers and those that gateways hold. Rates are tokens per second, counts are requests. The paper's w_q is one number;
here it follows the length of answers unless the profile gives one (`waiting_weight_of`).

Two rules the paper leaves open. `max(1, …)` makes light load look starved: a window with `running + w_q·waiting < 1`,
nothing waiting and some routable replica ranks as surplus and leaves `smoothed` alone. Demand without a routable
replica is critical with Z = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from policy_engine.core.shared.vocabulary import Region
from trimtab.config.specs import Slo, TokenServiceShare
from trimtab.domain.measurement import Measurement
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import Quality, Role

NOTHING_WAITING = 1e-3
USUAL_WAITING_WEIGHT = 8.0


@dataclass(frozen=True, slots=True)
class ShareState:
    """What the next window needs of the last one; kept in the store."""

    smoothed_tps: float | None = None
    region: Region = Region.NOMINAL
    window_end_s: float | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """The service state of one member in one window.

    `z` is None when it is unknown. `idle` ranks above every number. `fit`: it may choose a receiver;
    `fit_for_release`: it may make a donor.
    """

    z: float | None
    region: Region
    idle: bool
    demand: bool
    outstanding: float
    raw_tps: float | None
    fit: bool
    fit_for_release: bool
    detail: str = ""


def region_of(z: float, previous: Region, profile: TokenServiceShare) -> Region:
    """The region of Z. Each edge is left only beyond its hysteresis, so that small moves around it change nothing."""
    margin = profile.hysteresis
    critical_edge = profile.critical_below + (margin if previous == Region.CRITICAL else 0.0)
    surplus_edge = profile.surplus_above - (margin if previous == Region.SURPLUS else 0.0)
    if z < critical_edge:
        return Region.CRITICAL
    return Region.SURPLUS if z > surplus_edge else Region.NOMINAL


def waiting_weight_of(weight: float | None, slo: Slo, role: Role, answer_tokens: float | None) -> float:
    """w_q, where a profile does not say it: the time of an answer at its TPOT target over the TTFT target.

    By Little's law running and waiting requests take `running / decode_tps` and `waiting / request_rps` seconds,
    against the two targets; with `answer_tokens = decode_tps / request_rps` the sum of both shares of the SLO is
    `(running + w_q · waiting) / decode_tps / tpot target`. It is at least 1, the weight of a running request. While no
    answer is known, and for a prefill stage, which has none, it is the usual weight.
    """
    if weight is not None:
        return weight
    if answer_tokens is None or role == Role.PREFILL:
        return USUAL_WAITING_WEIGHT
    return max(1.0, answer_tokens * slo.tpot_s / slo.ttft_s)


def share_of(
    profile: TokenServiceShare,
    view: RoleSignals,
    front: FrontDoor,
    *,
    routable: int,
    previous: ShareState,
    waiting_weight: float | None = None,
) -> tuple[Share, ShareState]:
    """One member's share in its newest window, and the state for the next.

    `waiting_weight` is the result of `waiting_weight_of`; None: the profile's own. A window that was used already does
    not change `smoothed` again.
    """
    held = front.held.number(0.0)
    if routable == 0:
        return _without_capacity(view, held, previous)
    needed = _needed(view)
    unread = [signal for signal in needed if not signal.usable]
    if unread:
        z = None if previous.smoothed_tps is None else previous.smoothed_tps / profile.theta_tps
        share = Share(
            z, previous.region, False, held > NOTHING_WAITING, held, None, False, False, _said(view, unread[0])
        )
        return share, previous
    fit_for_release = all(signal.fit_for_release for signal in needed) and front.held.quality in (
        Quality.OK,
        Quality.MISSING,  # no gateway reports this service: the servers' own queues are all there is
    )
    if waiting_weight is None:
        waiting_weight = profile.waiting_weight if profile.waiting_weight is not None else USUAL_WAITING_WEIGHT
    waiting = view.waiting.number(0.0) + held
    outstanding = view.running.number(0.0) + waiting_weight * waiting
    if outstanding < 1 and waiting <= NOTHING_WAITING:
        return _idle(profile, outstanding, fit_for_release, view, previous)
    prefill_weight = profile.prefill_weight
    if view.role == Role.PREFILL and prefill_weight == 0:
        # Its own tokens are all that a prefill stage has.
        prefill_weight = 1.0
    raw = (prefill_weight * view.prefill_tps.number(0.0) + view.decode_tps.number(0.0)) / max(1.0, outstanding)
    raw = _with_unread(raw, max(needed, key=lambda signal: signal.unread_replicas), profile.theta_tps)
    smoothed = raw
    if previous.smoothed_tps is not None:
        same_window = view.window_end_s is not None and view.window_end_s == previous.window_end_s
        weight = 0.0 if same_window else profile.smoothing
        smoothed = weight * raw + (1 - weight) * previous.smoothed_tps
    z = smoothed / profile.theta_tps
    region = region_of(z, previous.region, profile)
    share = Share(z, region, False, True, outstanding, raw, True, fit_for_release)
    return share, ShareState(smoothed, region, view.window_end_s)


def _needed(view: RoleSignals) -> tuple[Measurement, ...]:
    """The signals without which a role has no share: a stage of a disaggregated service counts its own tokens."""
    tokens = {Role.PREFILL: (view.prefill_tps,), Role.DECODE: (view.decode_tps,)}
    return (*tokens.get(view.role, (view.prefill_tps, view.decode_tps)), view.running, view.waiting)


def _without_capacity(view: RoleSignals, held: float, previous: ShareState) -> tuple[Share, ShareState]:
    """The share without a routable replica: Z = 0 with demand. Sleepers' gauges are frozen and not used."""
    if held > NOTHING_WAITING:
        detail = f"{held:.0f} requests held and no routable replica"
        share = Share(0.0, Region.CRITICAL, False, True, held, 0.0, True, True, detail)
        return share, ShareState(previous.smoothed_tps, Region.CRITICAL, view.window_end_s)
    share = Share(None, Region.NOMINAL, True, False, 0.0, None, True, True, "no demand and no routable replica")
    return share, ShareState(previous.smoothed_tps, Region.NOMINAL, view.window_end_s)


def _idle(
    profile: TokenServiceShare, outstanding: float, fit_for_release: bool, view: RoleSignals, previous: ShareState
) -> tuple[Share, ShareState]:
    known = previous.smoothed_tps / profile.theta_tps if previous.smoothed_tps is not None else 0.0
    z = max(known, profile.surplus_above)
    share = Share(z, Region.SURPLUS, True, False, outstanding, None, True, fit_for_release, "idle")
    return share, ShareState(previous.smoothed_tps, Region.SURPLUS, view.window_end_s)


def _with_unread(raw: float, signal: Measurement, theta_tps: float) -> float:
    """Replicas that could not be read are counted at their target, which for a share is θ."""
    if not signal.unread_replicas:
        return raw
    return (raw * signal.reported + theta_tps * signal.unread_replicas) / signal.expected


def _said(view: RoleSignals, unread: Measurement) -> str:
    for name in ("prefill_tps", "decode_tps", "running", "waiting"):
        if getattr(view, name) is unread:
            return f"{name} is {unread.said()}"
    return unread.said()
