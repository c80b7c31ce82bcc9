"""Times of the contract: Unix seconds here, `google.protobuf.Timestamp` there, to the microsecond."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp


def to_timestamp(seconds: float | None) -> Timestamp | None:
    """The message of a time, None for None."""
    if seconds is None:
        return None
    stamp = Timestamp()
    stamp.FromMicroseconds(round(seconds * 1e6))
    return stamp


def from_timestamp(stamp: Timestamp) -> float:
    """The time in a message; 0 for one that is not set."""
    return stamp.ToMicroseconds() / 1e6
