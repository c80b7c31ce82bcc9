"""What one scrape of one server said, after parsing: plain finite numbers, absent where nothing was read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from metrics_collector.core.dialect import Quantity


@dataclass(frozen=True, slots=True)
class Histogram:
    """A cumulative histogram. ``bounds_s`` ascend and end in +Inf; ``cumulative[i]`` counts values ≤ bound i.

    As an increase between two scrapes it has the same shape.
    """

    bounds_s: tuple[float, ...]
    cumulative: tuple[float, ...]
    sum_s: float

    @property
    def count(self) -> float:
        """All values."""
        return self.cumulative[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSample:
    """The quantities of one page. A quantity that is absent here was absent on the page, or refused."""

    gauges: Mapping[Quantity, float] = field(default_factory=dict)
    counters: Mapping[Quantity, float] = field(default_factory=dict)
    histograms: Mapping[Quantity, Histogram] = field(default_factory=dict)
    kv_usage_max_ratio: float | None = None
    # Values refused on this page: NaN, infinite, negative or absurd.
    rejected: int = 0

    @property
    def awake(self) -> bool | None:
        """Whether every engine says that it is awake; None where the release does not say."""
        state = self.gauges.get(Quantity.AWAKE)
        return None if state is None else state >= 1.0

    @property
    def start_time_s(self) -> float | None:
        """Start of the server's process, on the server's clock."""
        return self.gauges.get(Quantity.START_TIME)
