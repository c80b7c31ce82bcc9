"""Demand at the front door: arrivals that gateways report, and the requests they hold for want of a routable replica.

A report covers the ``interval_s`` before it. The arrivals of a window are the reports' shares that lie inside it, over
the time that they cover; held requests are those of each gateway's last report. A gateway that has been silent for
``expiry_s`` is left out; when the last one of a service is, the service's demand is missing, not zero.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from metrics_collector.core.window import Window
from trimtab.domain.role_window import RoleWindow, SignalSums
from trimtab.domain.signals import Signal
from trimtab.domain.time import to_microseconds

_ARRIVALS = (Signal.ARRIVAL_RPS, Signal.ARRIVAL_PROMPT_TPS, Signal.ARRIVAL_OUTPUT_TPS)
# A service that no gateway has reported for so long is forgotten.
FORGET_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandReport:
    """One gateway's report of one service. Counts are of the ``interval_s`` before ``at_s``."""

    at_s: float
    interval_s: float
    arrivals: int
    prompt_tokens: int
    requested_output_tokens: int
    held: int


@dataclass(frozen=True, slots=True)
class DemandBoard:
    """Recent reports: service → gateway → reports, oldest first. Immutable; ``report`` gives the next one."""

    services: Mapping[str, Mapping[str, tuple[DemandReport, ...]]] = field(default_factory=dict)


def report(board: DemandBoard, gateway: str, demands: Mapping[str, DemandReport], *, keep_s: float) -> DemandBoard:
    """``board`` with one report of ``gateway`` for each service in ``demands``, all of the same moment.

    Reports that lie ahead of it are dropped: the clock was set back since.
    """
    services = dict(board.services)
    for service, latest in demands.items():
        gateways = dict(services.get(service, {}))
        earlier = gateways.get(gateway, ())
        gateways[gateway] = (*(item for item in earlier if 0 <= latest.at_s - item.at_s < keep_s), latest)
        services[service] = gateways
    return DemandBoard(services)


def forget(board: DemandBoard, *, now_s: float, forget_s: float = FORGET_S) -> DemandBoard:
    """``board`` without gateways, and services, that have been silent for ``forget_s``."""
    services: dict[str, Mapping[str, tuple[DemandReport, ...]]] = {}
    for service, gateways in board.services.items():
        kept = {gateway: reports for gateway, reports in gateways.items() if _is_near(reports, now_s, forget_s)}
        if kept:
            services[service] = kept
    return DemandBoard(services)


def without(board: DemandBoard, gateways: Collection[str]) -> DemandBoard:
    """``board`` without ``gateways``, which report to another collector by now: counted there, they are not here."""
    if not gateways:
        return board
    services = {
        service: {name: reports for name, reports in known.items() if name not in gateways}
        for service, known in board.services.items()
    }
    return DemandBoard({service: known for service, known in services.items() if known})


def front_door_windows(board: DemandBoard, window: Window, *, collector: str, expiry_s: float) -> list[RoleWindow]:
    """One window per service known, by name; gateways stand where replicas stand elsewhere."""
    found: list[RoleWindow] = []
    for service in sorted(board.services):
        gateways = board.services[service]
        heard = {name: gateways[name] for name in sorted(gateways) if _is_near(gateways[name], window.end_s, expiry_s)}
        rates, reported = _rates(list(heard.values()), window)
        held = [reports[-1].held for reports in heard.values()]
        found.append(
            RoleWindow(
                collector=collector,
                service=service,
                role=None,
                start_us=to_microseconds(window.start_s),
                end_us=to_microseconds(window.end_s),
                reported_replicas=list(heard),
                # Gateways come and go under new names; a silent one is missed only when no other reports.
                missing_replicas=[] if heard else sorted(gateways),
                signals=[
                    *(SignalSums(signal, rate, reported) for signal, rate in zip(_ARRIVALS, rates, strict=True)),
                    SignalSums(Signal.HELD, float(sum(held)), len(heard), max(held, default=None)),
                ],
            )
        )
    return found


def _is_near(reports: Sequence[DemandReport], now_s: float, limit_s: float) -> bool:
    """Whether the last report is less than ``limit_s`` away; one far ahead was made before the clock was set back."""
    return abs(now_s - reports[-1].at_s) < limit_s


def _rates(gateways: Sequence[tuple[DemandReport, ...]], window: Window) -> tuple[tuple[float, float, float], int]:
    """(requests, prompt tokens and output tokens per second over all gateways, how many reported inside)."""
    sums = [0.0, 0.0, 0.0]
    reported = 0
    for reports in gateways:
        counted = [0.0, 0.0, 0.0]
        covered_s = 0.0
        for item in reports:
            inside_s = min(item.at_s, window.end_s) - max(item.at_s - item.interval_s, window.start_s)
            if inside_s <= 0:
                continue
            covered_s += inside_s
            share = inside_s / item.interval_s
            for index, total in enumerate((item.arrivals, item.prompt_tokens, item.requested_output_tokens)):
                counted[index] += total * share
        if covered_s > 0:
            reported += 1
            for index, count in enumerate(counted):
                sums[index] += count / covered_s
    return (sums[0], sums[1], sums[2]), reported
