"""Days of load: a curve of the day with a morning and an afternoon peak, quieter weekends, and many bursty clients.

The curve's form follows what HeteroScale reports of chat services (peaks by day, a deep valley at night); its figures
are ours. A workday's mean is 1, its peak 1.7 and its valley 0.3.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulator.traces.generators import Curve
from simulator.traces.model import TraceRequest
from simulator.traces.servegen import DAY_S, ClientMix, made_up_clients, requests_of_clients

HOUR_S = 3600.0
# By the hour of the day, from midnight.
HOURS = (
    0.56, 0.42, 0.34, 0.30, 0.30, 0.34, 0.48, 0.75, 1.10, 1.36, 1.56, 1.60,
    1.34, 1.22, 1.44, 1.62, 1.70, 1.54, 1.30, 1.12, 1.06, 1.02, 0.84, 0.69,
)  # fmt: skip
WEEKEND = 0.7
_DAYS_A_WEEK, _WORKDAYS = 7, 5


def day_curve(duration_s: float) -> Curve:
    """The rate over days, relative to a workday's mean; the first day is a workday, the sixth the first off."""
    hours = int(duration_s // HOUR_S) + 1
    points = []
    for hour in range(hours + 1):
        day = hour // 24 % _DAYS_A_WEEK
        points.append((hour * HOUR_S, HOURS[hour % 24] * (WEEKEND if day >= _WORKDAYS else 1.0)))
    return Curve(tuple(points))


def diurnal(
    *,
    seed: int,
    service: str = "chat",
    duration_s: float = DAY_S,
    mean_rps: float = 2.0,
    clients: int = 40,
    prompt_mean_tokens: float = 900.0,
    output_mean_tokens: float = 155.0,
) -> Iterator[TraceRequest]:
    """Requests of one service over days, by arrival; `mean_rps` is a workday's mean."""
    mix = ClientMix(
        clients=clients,
        total_rps=mean_rps,
        prompt_mean_tokens=prompt_mean_tokens,
        output_mean_tokens=output_mean_tokens,
    )
    made = made_up_clients(mix, curve=day_curve(duration_s), duration_s=duration_s, seed=seed)
    return requests_of_clients(made, service=service, seed=seed, duration_s=duration_s)
