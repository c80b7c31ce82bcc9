"""A static split of the pool on a trace: fleets that share nothing, so no control plane is needed to run them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from lab.evaluation.statistics import Slo
from lab.virtual.fixed.colocated import colocated
from simulator.core.profile import Profile
from simulator.traces.model import TraceRequest


@dataclasses.dataclass(frozen=True, slots=True)
class StaticOutcome:
    """What a static split attains: share of all requests within their SLO, by model too, and P95 and P99 of E2E."""

    attainment: float
    by_model: Mapping[str, float]
    e2e_p95_s: float
    e2e_p99_s: float


def run_static(
    requests: Iterable[TraceRequest],
    *,
    profiles: Mapping[str, Profile],
    slos: Mapping[str, Slo],
    replicas: Mapping[str, int],
) -> StaticOutcome:
    """Serve a trace with a fixed fleet for each model, least loaded first. Raises ValueError without any request."""
    fleets = {model: colocated(profiles[model], replicas[model]) for model in sorted(replicas)}
    for request in requests:
        fleets[request.service].submit(request)
    records = {model: fleet.run(()) for model, fleet in fleets.items()}
    served = {model: len(record) for model, record in records.items() if len(record)}
    if not served:
        raise ValueError("no request was served, so there is nothing to say of a static split")
    by_model = {
        model: records[model].attainment(ttft_s=slos[model].ttft_s, tpot_s=slos[model].tpot_s) for model in served
    }
    e2e_s = np.concatenate([records[model].e2e_s for model in served])
    p95_s, p99_s = (float(value) for value in np.quantile(e2e_s, [0.95, 0.99]))
    good = sum(by_model[model] * count for model, count in served.items())
    return StaticOutcome(good / sum(served.values()), by_model, p95_s, p99_s)
