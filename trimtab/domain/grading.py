"""Which quality a value over several replicas has. The first that applies:

no replica in the sum     STALE when one is stale, WARMING when one is too new, else MISSING; no value
a counter fell            RESET: what was counted since is included, so the value may be too small
n < m                     PARTIAL n of m
a replica is new          WARMING
else                      OK
"""

from __future__ import annotations

import math
from typing import NamedTuple

from trimtab.domain.measurement import Measurement
from trimtab.domain.vocabulary import Quality


class Tally(NamedTuple):
    """How many replicas a value rests on, and in what state; `refused` ones sent numbers that are none."""

    reported: int = 0
    stale: int = 0
    reset: int = 0
    warming: int = 0
    refused: int = 0


class Coverage(NamedTuple):
    """m of "n of m", and how many of the replicas that reported are not among the m."""

    expected: int
    strangers: int = 0

    def reported(self, contributors: int) -> int:
        """n: contributors that are expected. Which ones a sum holds is not known, so strangers count against it."""
        known = contributors - self.strangers
        if known < 0:
            return 0
        return known if known < self.expected else self.expected


def grade(value: float | None, tally: Tally, coverage: Coverage, note: str = "") -> Measurement:
    """The value with its quality. `note` is the reason for an absent value, where the counts do not show it."""
    reported, expected = coverage.reported(tally.reported), coverage.expected
    details = [note] if note else []
    if value is not None and not 0 <= value < math.inf:
        # Sums of huge but finite numbers.
        value = None
        details.append("out of range")
    if reported < expected:
        counted = ((tally.stale, "stale"), (tally.warming, "warming"), (tally.refused, "refused"))
        details += [f"{count} {word}" for count, word in counted if count]
    if reported == 0 or value is None:
        if expected == 0:
            details.insert(0, "no replica is expected")
        return Measurement(None, _absent(tally), reported, expected, "; ".join(details))
    if tally.reset:
        quality = Quality.RESET
    elif reported < expected:
        quality = Quality.PARTIAL
    elif tally.warming:
        quality = Quality.WARMING
    else:
        quality = Quality.OK
    return Measurement(value, quality, reported, expected, "; ".join(details) if details else "")


def is_sane(number: float) -> bool:
    """Whether it can be a measured number: finite and not negative."""
    return 0 <= number < math.inf


def _absent(tally: Tally) -> Quality:
    if tally.stale and not tally.reported:
        return Quality.STALE
    if tally.warming and not tally.reported:
        return Quality.WARMING
    return Quality.MISSING
