"""Times on the wire: Unix seconds as Timestamps, rounded to the microsecond everywhere.

A float of Unix seconds has a resolution of a microsecond, so what is written is read back as the same number.
"""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp


def timestamp_of(seconds: float) -> Timestamp:
    """The Timestamp of Unix seconds. Raises ValueError outside of the years 1 to 9999, and for what is not finite."""
    return timestamp_of_microseconds(to_microseconds(seconds))


def optional_timestamp(seconds: float | None) -> Timestamp | None:
    """The same where there may be none: None for None. Raises ValueError likewise."""
    return None if seconds is None else timestamp_of(seconds)


def timestamp_of_microseconds(microseconds: int) -> Timestamp:
    """The Timestamp of microseconds since 1970. Raises ValueError outside of the years 1 to 9999."""
    stamp = Timestamp()
    stamp.FromMicroseconds(microseconds)
    return stamp


def seconds_of(stamp: Timestamp) -> float:
    """Unix seconds, without what is below a microsecond. Never raises: whether a time makes sense is another check."""
    return microseconds_of(stamp) / 1e6


def microseconds_of(stamp: Timestamp) -> int:
    """Microseconds since 1970, for comparisons that must be exact."""
    return stamp.seconds * 1_000_000 + stamp.nanos // 1000


def to_microseconds(seconds: float) -> int:
    """Unix seconds as the whole microseconds that `timestamp_of` writes. Raises ValueError for what is not finite."""
    try:
        return round(seconds * 1e6)
    except OverflowError as error:
        raise ValueError(f"{seconds} is no time") from error
