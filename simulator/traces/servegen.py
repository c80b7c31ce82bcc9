"""Load made of many clients, each with a rate, a burstiness and lengths of its own that change by the window.

The form is that of ServeGen ("ServeGen: Workload Characterization and Generation of Large Language Model Serving in
Production", 2025): in a window a client sends requests at its rate, with gaps from a Gamma or Weibull
distribution whose shape is given and whose scale follows from the rate. Scales that the data set states are not used:
they were fitted to gaps without the idle time between bursts, and would give other rates than those measured.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from simulator.traces.generators import Curve, Lengths
from simulator.traces.lengths import Floats, LengthLaw
from simulator.traces.model import TraceRequest
from simulator.traces.seeding import generator
from simulator.traces.streams import MAX_DURATION_S, arrival_order

DAY_S = 86_400.0
WINDOW_S = 600.0
# One client may not send more in one window; beyond it a file is wrong, or a scale is.
MAX_REQUESTS_PER_WINDOW = 5_000_000
# How far made-up clients' mean lengths differ (of the logarithm), and how long one request may be against its mean.
_LENGTH_SIGMA = 0.8
_MAX_LENGTH_RATIO = 30


class Pattern(enum.Enum):
    """The family of a window's gaps; the values are those of ServeGen's packed files."""

    NONE = 0
    GAMMA = 1
    WEIBULL = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """What a client does from `start_s` to the start of its next window."""

    start_s: float
    rate_rps: float
    pattern: Pattern = Pattern.NONE
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.rate_rps) or self.rate_rps < 0:
            raise ValueError(f"a rate is finite and not negative, not {self.rate_rps}")
        if self.pattern is not Pattern.NONE and not (math.isfinite(self.shape) and self.shape > 0):
            raise ValueError(f"a shape is finite and above 0, not {self.shape}")

    def gaps(self, source: np.random.Generator, count: int) -> Floats:
        """`count` gaps of the window's family, of any scale. A window without a family has Poisson arrivals."""
        if self.pattern is Pattern.GAMMA:
            return source.gamma(self.shape, 1.0, count)
        if self.pattern is Pattern.WEIBULL:
            return source.weibull(self.shape, count)
        return source.exponential(1.0, count)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A sender of requests. Its windows are in order; the last one lasts `window_s`."""

    name: str
    windows: tuple[Window, ...]
    window_s: float = WINDOW_S
    prompt: LengthLaw
    output: LengthLaw

    def __post_init__(self) -> None:
        if self.window_s <= 0 or not self.windows:
            raise ValueError(f"client {self.name} needs at least one window, and windows of some length")
        for before, after in zip(self.windows, self.windows[1:], strict=False):
            if after.start_s <= before.start_s:
                raise ValueError(f"client {self.name}: windows go forward in time: {after.start_s} s")

    def end_s(self, index: int) -> float:
        """The end of a window."""
        last = index + 1 == len(self.windows)
        return self.windows[index].start_s + self.window_s if last else self.windows[index + 1].start_s

    @property
    def mean_rps(self) -> float:
        """Requests per second over all windows."""
        span_s = self.end_s(len(self.windows) - 1) - self.windows[0].start_s
        due = sum(w.rate_rps * (self.end_s(i) - w.start_s) for i, w in enumerate(self.windows))
        return due / span_s


def requests_of_clients(
    clients: Iterable[Client],
    *,
    service: str,
    seed: int,
    start_s: float = 0.0,
    duration_s: float = DAY_S,
    rate_scale: float = 1.0,
) -> Iterator[TraceRequest]:
    """Requests of all clients from `start_s` on, with arrivals from 0, in order.

    Memory is one window's requests of each client. A client's draws depend on the seed, its name and the window, so a
    slice has the same requests as the whole (where it begins with a window). Raises ValueError for an impossible time
    or scale, and for two clients of one name.
    """
    if not 0 < duration_s <= MAX_DURATION_S or start_s < 0:
        raise ValueError(f"needs start ≥ 0 and 0 < duration ≤ {MAX_DURATION_S:g} s, not {start_s} and {duration_s}")
    if not 0 < rate_scale <= 1e6:
        raise ValueError(f"rate_scale must be above 0 and at most 1,000,000, not {rate_scale}")
    ordered = sorted(clients, key=lambda client: client.name)
    for one, other in itertools.pairwise(ordered):
        if one.name == other.name:
            raise ValueError(f"two clients are named {one.name}")
    return heapq.merge(
        *(_requests(c, service, seed, start_s, start_s + duration_s, rate_scale) for c in ordered), key=arrival_order
    )


def _requests(
    client: Client, service: str, seed: int, start_s: float, end_s: float, rate_scale: float
) -> Iterator[TraceRequest]:
    for index, window in enumerate(client.windows):
        window_end_s = client.end_s(index)
        if window_end_s <= start_s or window.rate_rps <= 0:
            continue
        if window.start_s >= end_s:
            return
        source = generator(seed, "client", service, client.name, f"{window.start_s:.3f}")
        due = window.rate_rps * rate_scale * (window_end_s - window.start_s)
        if due > MAX_REQUESTS_PER_WINDOW:
            raise ValueError(
                f"client {client.name}: {due:.0f} requests in the window at {window.start_s:g} s; "
                f"at most {MAX_REQUESTS_PER_WINDOW}: lower the rate or its scale"
            )
        count = math.floor(due) + int(source.random() < due % 1)
        # One gap more than requests, on a circle that is cut anywhere: a bursty client's first gap is a short one as
        # a rule, and without a cut of its own every client's burst would begin with the window.
        gaps = np.cumsum(window.gaps(source, count + 1))
        spread = gaps[:-1] / gaps[-1] if gaps[-1] > 0 else np.arange(1, count + 1) / (count + 1)
        spread = np.sort((spread + source.random()) % 1.0)
        times = (window.start_s + spread * (window_end_s - window.start_s)).tolist()
        prompts = client.prompt.sample(source, count).tolist()
        outputs = client.output.sample(source, count).tolist()
        for time_s, prompt, output in zip(times, prompts, outputs, strict=True):
            if start_s <= time_s < end_s:
                yield TraceRequest(time_s - start_s, service, prompt, output)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClientMix:
    """Made-up clients in ServeGen's form: few send most, most are bursty, all follow one curve of the day."""

    clients: int
    total_rps: float
    """At the curve's value 1."""
    skew: float = 1.1
    """Exponent of Zipf's law over the clients' rates."""
    cv_median: float = 1.6
    cv_sigma: float = 0.7
    """Of the lognormal distribution that clients' burstiness is drawn from."""
    weibull_share: float = 0.35
    """Clients whose gaps are Weibull's, by chance; the others' are Gamma."""
    prompt_mean_tokens: float = 900.0
    output_mean_tokens: float = 155.0
    window_s: float = WINDOW_S

    def __post_init__(self) -> None:
        if not 1 <= self.clients <= 100_000:
            raise ValueError(f"clients must be from 1 to 100,000, not {self.clients}")
        if not self.total_rps > 0 or not self.cv_median > 0 or self.skew < 0 or self.cv_sigma < 0:
            raise ValueError("total_rps and cv_median must be above 0, skew and cv_sigma not below")


def made_up_clients(mix: ClientMix, *, curve: Curve, duration_s: float, seed: int) -> list[Client]:
    """Clients of a mix over `duration_s`; the sum of their rates follows `mix.total_rps` times the curve."""
    source = generator(seed, "client-mix")
    weights = np.arange(1, mix.clients + 1, dtype=np.float64) ** -mix.skew
    weights /= weights.sum()
    starts = [index * mix.window_s for index in range(math.ceil(duration_s / mix.window_s))]
    # Clients differ in lengths; one that sends much must not move the mean of the whole.
    prompts = _spread_means(source, weights, mix.prompt_mean_tokens)
    outputs = _spread_means(source, weights, mix.output_mean_tokens)
    clients = []
    for index, weight in enumerate(weights.tolist()):
        cv = float(np.clip(mix.cv_median * math.exp(mix.cv_sigma * source.standard_normal()), 0.5, 20.0))
        pattern = Pattern.WEIBULL if source.random() < mix.weibull_share else Pattern.GAMMA
        shape = 1.0 / cv**2 if pattern is Pattern.GAMMA else weibull_shape(cv)
        clients.append(
            Client(
                name=f"client-{index:05d}",
                windows=tuple(
                    Window(start_s, mix.total_rps * weight * curve.at(start_s + mix.window_s / 2), pattern, shape)
                    for start_s in starts
                ),
                window_s=mix.window_s,
                prompt=Lengths(
                    mean_tokens=prompts[index], cv=1.0, max_tokens=_MAX_LENGTH_RATIO * round(prompts[index] + 1)
                ),
                output=Lengths(
                    mean_tokens=outputs[index], cv=1.2, max_tokens=_MAX_LENGTH_RATIO * round(outputs[index] + 1)
                ),
            )
        )
    return clients


def _spread_means(source: np.random.Generator, weights: Floats, mean_tokens: float) -> list[float]:
    """A mean length for each client, lognormal, whose mean over all requests is `mean_tokens`."""
    means = np.exp(_LENGTH_SIGMA * source.standard_normal(len(weights)))
    means *= mean_tokens / float(means @ weights)
    return [max(1.0, mean) for mean in means.tolist()]


def weibull_shape(cv: float) -> float:
    """The shape at which a Weibull distribution has this coefficient of variation.

    Raises ValueError unless 0.2 ≤ cv ≤ 30.
    """
    if not 0.2 <= cv <= 30:
        raise ValueError(f"cv must be from 0.2 to 30, not {cv}")
    low, high = 0.1, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        # log Γ: the gammas themselves overflow at small shapes.
        ratio = math.exp(math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle)) - 1
        low, high = (middle, high) if ratio > cv * cv else (low, middle)
    return (low + high) / 2


def client_shares(clients: Sequence[Client]) -> list[float]:
    """Each client's share of the requests, largest first."""
    rates = sorted((client.mean_rps for client in clients), reverse=True)
    total = sum(rates)
    return [rate / total for rate in rates] if total > 0 else []
