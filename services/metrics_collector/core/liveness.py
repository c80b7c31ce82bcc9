"""The state of a server behind its gauges: up, asleep, or stuck with work that does not move.

Gauges mislead in three ways. A sleeping server freezes them. A wedged one leaves them unchanged, or at zero, while its
health check goes on answering. An aborted load may leave ``waiting`` at its last number. So a server is judged by
movement: an engine with work moves a counter, its running requests or its KV usage in every iteration. Two more sources
are used: the server's own count of open requests (``GET /load``) and the requests that gateways have open there.

    the page shows                           and                                      it is
    asleep                                   open requests, where they are known      ASLEEP; they are demand
    anything                                 something moved within the limit         UP
    running or waiting, nothing moves        no report has a request open             STUCK: left by an aborted load
    running or waiting, nothing moves        otherwise                                STUCK
    zeros, nothing moves                     a request open and unanswered too long   STUCK: wedged
    zeros, nothing moves                     otherwise                                UP: it is idle

The limit is the longest iteration of the server's role.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from metrics_collector.core.counting import Bools, Floats
from metrics_collector.core.replica_windows import ReplicaWindows
from trimtab.api.collector.v1 import collector_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessReport:
    """What is known of a server beside its page; None is not known.

    ``load`` is its own count of open requests, ``in_flight`` the gateways' sum. ``open_since_s``: since when a request
    has been open without any answer to one; None while none is.
    """

    load: float | None = None
    in_flight: int | None = None
    open_since_s: float | None = None


def liveness_report(
    before: LivenessReport | None, *, load: float | None, in_flight: int | None, answered: int, now_s: float
) -> LivenessReport:
    """The next word on a server; ``answered`` counts the chunks of answers that came since the word before."""
    if not (load or in_flight):
        return LivenessReport(load=load, in_flight=in_flight)
    since_s = None if before is None or answered else before.open_since_s
    return LivenessReport(
        load=load, in_flight=in_flight, open_since_s=now_s if since_s is None else min(since_s, now_s)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What a server shows: gauges of its newest page (None where absent), how long nothing has moved, and for how long
    a request has been open without an answer (0 while none is)."""

    asleep: bool
    running: float | None
    waiting: float | None
    still_s: float
    load: float | None = None
    in_flight: int | None = None
    unanswered_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``state`` is UP, STUCK or ASLEEP; ``reason`` one line, empty for what is as it should be."""

    state: "pb.TargetState.ValueType"
    reason: str = ""


def judge(signs: Signs, *, limit_s: float) -> Verdict:
    """By the table in this module's docstring; ``limit_s`` is the role's longest iteration."""
    known = [count for count in (signs.load, signs.in_flight) if count is not None]
    opened = max(known, default=0)
    if signs.asleep:
        reason = f"it sleeps while {_requests(opened)} waiting for it" if opened else ""
        return Verdict(state=pb.TARGET_STATE_ASLEEP, reason=reason)
    if signs.still_s <= limit_s:
        return Verdict(state=pb.TARGET_STATE_UP)
    running, waiting = signs.running or 0.0, signs.waiting or 0.0
    if running > 0 or waiting > 0:
        gauges = f"its gauges show {running:g} running and {waiting:g} waiting"
        if known and not opened:
            reason = f"{gauges}, but no request is open there: an aborted load left them standing"
        else:
            reason = f"{gauges}, but nothing has moved for {signs.still_s:.0f} s"
        return Verdict(state=pb.TARGET_STATE_STUCK, reason=reason)
    if opened and signs.unanswered_s > limit_s:
        reason = f"its gauges are zero and its counters stand while {_requests(opened)} open there"
        reason = f"{reason}, without an answer for {signs.unanswered_s:.0f} s: it is wedged"
        return Verdict(state=pb.TARGET_STATE_STUCK, reason=reason)
    return Verdict(state=pb.TARGET_STATE_UP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Columns, one entry per replica. ``states`` are ``TargetState`` numbers, UP where no page was read in the window.

    ``stuck``: its values are left out. ``asleep_load``: requests that wait at a sleeper; NaN for others, and where the
    number is unknown. ``reasons`` by position, for those that have one.
    """

    states: NDArray[np.uint8]
    stuck: Bools
    asleep_load: Floats
    reasons: Mapping[int, str]


def judge_all(
    target_ids: Sequence[str], windows: ReplicaWindows, witnesses: Mapping[str, LivenessReport], *, limits_s: Floats
) -> Verdicts:
    """The verdict on each of ``target_ids``, in whose order ``windows`` and ``limits_s`` (n,) are."""
    states = np.full(len(target_ids), pb.TARGET_STATE_UP, dtype=np.uint8)
    states[windows.asleep] = pb.TARGET_STATE_ASLEEP
    asleep_load = np.full(len(target_ids), np.nan)
    reasons: dict[int, str] = {}
    still = windows.read & (windows.still_s > limits_s)
    busy = (windows.running_now > 0) | (windows.waiting_now > 0)
    doubtful = windows.asleep | (still & busy)
    if witnesses:
        doubtful |= still & np.fromiter((name in witnesses for name in target_ids), dtype=bool, count=len(target_ids))
    for position in np.flatnonzero(doubtful).tolist():
        other = witnesses.get(target_ids[position], _UNKNOWN)
        opened_s = other.open_since_s
        verdict = judge(
            Signs(
                asleep=bool(windows.asleep[position]),
                running=_number(windows.running_now[position]),
                waiting=_number(windows.waiting_now[position]),
                still_s=float(windows.still_s[position]),
                load=other.load,
                in_flight=other.in_flight,
                unanswered_s=0.0 if opened_s is None else windows.window.end_s - opened_s,
            ),
            limit_s=float(limits_s[position]),
        )
        states[position] = verdict.state
        if verdict.reason:
            reasons[position] = verdict.reason
        if verdict.state == pb.TARGET_STATE_ASLEEP:
            known = other.load if other.load is not None else other.in_flight
            asleep_load[position] = np.nan if known is None else known
    return Verdicts(states=states, stuck=states == pb.TARGET_STATE_STUCK, asleep_load=asleep_load, reasons=reasons)


_UNKNOWN = LivenessReport()


def _requests(count: float) -> str:
    return "1 request is" if count == 1 else f"{count:g} requests are"


def _number(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)
