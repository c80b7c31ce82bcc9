"""How much a fixed number of replicas serves within its limits, by how many of them prefill and how many decode.

HeteroScale (section 4.1, figure 4) shows a peak inside: with too few prefill replicas TTFT caps the throughput while
decode idles, with too many the decode replicas are overwhelmed and TBT does. Here the rate is raised until a quantile
of either leaves its limit; which one does so first is the bound. Where decode runs out of KV space, requests wait for
it between their first token and the second, which counts in TBT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from lab.virtual.fixed.disaggregated import disaggregated
from lab.virtual.network import Place
from simulator.core.profile import Profile
from simulator.traces.generators import Curve, Lengths, ServiceLoad, generate
from simulator.traces.model import TraceRequest

_REL_TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RatioService:
    """A service's mean lengths and its limits."""

    name: str
    prompt_tokens: float
    output_tokens: float
    ttft_s: float
    tbt_s: float
    prompt_cv: float = 0.5
    output_cv: float = 0.5


SERVICE_A = RatioService(name="A", prompt_tokens=3000, output_tokens=350, ttft_s=1.0, tbt_s=0.040)
SERVICE_B = RatioService(name="B", prompt_tokens=7800, output_tokens=700, ttft_s=1.0, tbt_s=0.020)
"""Lengths and limits of HeteroScale's services; how far lengths scatter is not published, 0.5 is assumed."""


@dataclasses.dataclass(frozen=True, slots=True)
class RatioPoint:
    """The most that one split of the replicas serves within the limits."""

    prefill: int
    decode: int
    goodput_rps: float
    bound: str
    """`TTFT` or `TBT`: what leaves its limit when the rate goes up further."""
    ttft_s: float
    """The quantile of each at the goodput."""
    tbt_s: float
    output_tps: float
    transfer_share: float
    """Mean transfer over mean TTFT."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    ttft_s: float
    tbt_s: float
    transfer_share: float

    def breach(self, service: RatioService) -> str | None:
        """The limit that is missed by more, relative to it."""
        worst = max((self.ttft_s / service.ttft_s, "TTFT"), (self.tbt_s / service.tbt_s, "TBT"))
        return worst[1] if worst[0] > 1 else None


def workload(service: RatioService, *, rate_rps: float, requests: int, seed: int) -> list[TraceRequest]:
    """Poisson arrivals with the service's lengths."""
    load = ServiceLoad(
        service=service.name,
        request_rps=Curve(((0.0, rate_rps),)),
        prompt=_lengths(service.prompt_tokens, service.prompt_cv),
        output=_lengths(service.output_tokens, service.output_cv),
    )
    return generate([load], duration_s=requests / rate_rps, seed=seed)


def sweep(
    service: RatioService,
    prefill: Profile,
    decode: Profile,
    *,
    replicas: int = 16,
    quantile: float = 0.9,
    requests: int = 2500,
    seed: int = 1,
    cross_switch: bool = False,
) -> Iterator[RatioPoint]:
    """Every split of `replicas`, from one prefill replica to one decode replica.

    `cross_switch` puts the two roles under different switches. Raises ValueError for fewer than two replicas, or when
    a single request on an idle fleet misses the limits already.
    """
    if replicas < 2:
        raise ValueError(f"a split needs at least 2 replicas, not {replicas}")
    for count in range(1, replicas):
        split = _Split(service, prefill, decode, count, replicas - count, quantile, requests, seed, cross_switch)
        yield split.best()


def goodput(
    service: RatioService,
    profile: Profile,
    *,
    prefill_replicas: int,
    decode_replicas: int,
    quantile: float = 0.9,
    requests: int = 2500,
    seed: int = 1,
) -> RatioPoint:
    """One split of replicas of one profile; raises ValueError as `sweep` does."""
    if min(prefill_replicas, decode_replicas) < 1:
        raise ValueError(f"a split has a replica of each role, not {prefill_replicas} and {decode_replicas}")
    split = _Split(service, profile, profile, prefill_replicas, decode_replicas, quantile, requests, seed, False)
    return split.best()


def peak(points: Sequence[RatioPoint]) -> RatioPoint:
    """The point of highest goodput; ties go to fewer prefill replicas."""
    return max(points, key=lambda point: (point.goodput_rps, -point.prefill))


@dataclasses.dataclass(frozen=True, slots=True)
class _Split:
    service: RatioService
    prefill: Profile
    decode: Profile
    prefill_replicas: int
    decode_replicas: int
    quantile: float
    requests: int
    seed: int
    cross_switch: bool

    def best(self) -> RatioPoint:
        """Raise the rate until a limit is missed, then narrow down."""
        low_rps, high_rps = 0.0, 0.05 * (self.prefill_replicas + self.decode_replicas)
        served, missed = self._serve(high_rps), ""
        kept = served
        while True:
            breach = served.breach(self.service)
            if breach is not None:
                missed = breach
                break
            low_rps, kept, high_rps = high_rps, served, 2 * high_rps
            served = self._serve(high_rps)
        if low_rps == 0.0:
            raise ValueError(
                f"service {self.service.name}: {missed} is missed at {high_rps:g} requests/s already; "
                "these replicas cannot meet the limits"
            )
        while high_rps - low_rps > _REL_TOLERANCE * high_rps:
            middle_rps = (low_rps + high_rps) / 2
            served = self._serve(middle_rps)
            breach = served.breach(self.service)
            if breach is None:
                low_rps, kept = middle_rps, served
            else:
                high_rps, missed = middle_rps, breach
        return RatioPoint(
            prefill=self.prefill_replicas,
            decode=self.decode_replicas,
            goodput_rps=low_rps,
            bound=missed,
            ttft_s=kept.ttft_s,
            tbt_s=kept.tbt_s,
            output_tps=low_rps * self.service.output_tokens,
            transfer_share=kept.transfer_share,
        )

    def _serve(self, rate_rps: float) -> _Outcome:
        fleet = disaggregated(
            self.prefill,
            self.decode,
            prefill_places=[Place(s1="s1-0")] * self.prefill_replicas,
            decode_places=[Place(s1="s1-1" if self.cross_switch else "s1-0")] * self.decode_replicas,
        )
        records = fleet.run(workload(self.service, rate_rps=rate_rps, requests=self.requests, seed=self.seed))
        # The first fifth fills an empty fleet and is no part of its steady state.
        steady = np.argsort(records.arrival_s)[len(records) // 5 :]
        ttft_s = records.ttft_s[steady]
        gaps_s = (records.e2e_s[steady] - ttft_s) / np.maximum(1, records.output_tokens[steady] - 1)
        return _Outcome(
            ttft_s=float(np.quantile(ttft_s, self.quantile)),
            tbt_s=float(np.quantile(gaps_s, self.quantile)),
            transfer_share=fleet.transfer_s / max(1, len(records)) / float(np.mean(records.ttft_s)),
        )


def _lengths(mean_tokens: float, cv: float) -> Lengths:
    return Lengths(mean_tokens=mean_tokens, cv=cv, min_tokens=2, max_tokens=round(4 * mean_tokens))
