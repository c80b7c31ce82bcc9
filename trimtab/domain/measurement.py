"""A measurement: a value with a quality, never a bare number.

A missing value is not zero: a caller that needs a number passes the one to use in its absence. Whether a
measurement may justify taking capacity away is decided here (`fit_for_release`), for scaled and pooled services alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.api.common.v1 import types_pb2
from trimtab.domain.vocabulary import Quality

MIN_REPORTED_SHARE = 0.95
"""Share of the expected replicas that must have contributed to a partial measurement before capacity is taken away."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement. `value` is finite, never negative, and None exactly when nothing was read.

    `reported` of `expected` replicas contributed; both are 0 where that is not known or does not apply.
    """

    value: float | None
    quality: Quality
    reported: int = 0
    expected: int = 0
    detail: str = ""

    @property
    def usable(self) -> bool:
        """Whether the value may be used in calculations. A stale value is not: its server is stuck."""
        return self.value is not None and self.quality not in (Quality.MISSING, Quality.STALE)

    @property
    def fit_for_release(self) -> bool:
        """Whether capacity may be taken away on it: ok, or partial with at least 95 % of the replicas."""
        if self.value is None:
            return False
        if self.quality == Quality.OK:
            return True
        return (
            self.quality == Quality.PARTIAL
            and self.expected > 0
            and self.reported >= MIN_REPORTED_SHARE * self.expected - 1e-9
        )

    @property
    def unread_replicas(self) -> int:
        """Replicas that should have contributed and did not."""
        return max(0, self.expected - self.reported) if self.quality == Quality.PARTIAL else 0

    def number(self, default: float) -> float:
        """The value where it is usable, else `default`."""
        return self.value if self.value is not None and self.usable else default

    def said(self) -> str:
        """The quality as people read it, such as `partial 4 of 8`."""
        text = f"partial {self.reported} of {self.expected}" if self.quality == Quality.PARTIAL else self.quality.value
        return f"{text} ({self.detail})" if self.detail else text


def ok(value: float) -> Measurement:
    """A value that was read in full."""
    return Measurement(value=value, quality=Quality.OK)


def missing(detail: str = "") -> Measurement:
    """Nothing was read."""
    return Measurement(value=None, quality=Quality.MISSING, detail=detail)


NEVER_READ = missing("never observed")

_NUMBERS = {quality: types_pb2.Quality.ValueType(quality.number) for quality in Quality}
_QUALITIES: dict[int, Quality] = {number: quality for quality, number in _NUMBERS.items()}


def measurement_to_proto(measurement: Measurement) -> types_pb2.Measurement:
    """The message of a measurement."""
    return types_pb2.Measurement(
        value=measurement.value,
        quality=_NUMBERS[measurement.quality],
        reported=measurement.reported,
        expected=measurement.expected,
        detail=measurement.detail,
    )


def measurement_from_proto(message: types_pb2.Measurement) -> Measurement:
    """The measurement in a message. It is missing without a value, and with a value that is not finite or negative."""
    quality = _QUALITIES.get(message.quality)
    if quality is None:
        return missing("a quality that this version does not know")
    value = message.value if message.HasField("value") else None
    if value is not None and not (math.isfinite(value) and value >= 0):
        return missing("not a finite number")
    if value is None and quality in (Quality.OK, Quality.PARTIAL, Quality.RESET):
        quality = Quality.MISSING
    if quality == Quality.MISSING:
        value = None
    return Measurement(value, quality, message.reported, message.expected, message.detail)
