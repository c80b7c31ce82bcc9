"""Which replicas a gateway avoids for a moment, because they have failed a request. Pure: every call gets `now_s`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Container, Sequence
from typing import Protocol, TypeVar

ReplicaKey = tuple[str, str]
"""(cluster, replica)."""


class Failure(enum.Enum):
    """How a replica failed a request: it could not be reached or fell silent, or it answered with an error."""

    UNREACHABLE = "unreachable"
    ERROR = "error"


class Keyed(Protocol):
    """What can be chosen."""

    @property
    def key(self) -> ReplicaKey:
        """Unique over clusters."""
        ...


K = TypeVar("K", bound=Keyed)


@dataclasses.dataclass(slots=True)
class _Ejection:
    until_s: float
    failures: int
    unreachable: bool
    number: int
    """The number of its newest failure among all failures."""


class OutlierEjection:
    """The replicas that have failed, and not answered since."""

    def __init__(self, *, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._ejected: dict[ReplicaKey, _Ejection] = {}
        self.failures = 0
        """How many failures there were in all."""

    def __bool__(self) -> bool:
        return bool(self._ejected)

    def keep(self, known: Container[ReplicaKey]) -> None:
        """Forget every replica that is not `known`."""
        self._ejected = {key: value for key, value in self._ejected.items() if key in known}

    def failed(self, key: ReplicaKey, failure: Failure, *, now_s: float) -> None:
        """Avoid a replica for a moment, longer each time it fails again before it has answered.

        After an `ERROR` it is still taken when no other is there, but by no request that it has failed itself: that one
        waits. An `UNREACHABLE` one is not taken at all meanwhile.
        """
        before = self._ejected.get(key)
        failures = before.failures + 1 if before is not None else 1
        avoid_s = min(self._longest_s, self._first_s * 2.0 ** min(failures - 1, 16))
        self.failures += 1
        self._ejected[key] = _Ejection(now_s + avoid_s, failures, failure is Failure.UNREACHABLE, self.failures)

    def answered(self, key: ReplicaKey, *, failures_before: int) -> None:
        """A replica has answered a request that was sent after `failures_before` failures.

        An answer that was under way before the last failure proves nothing: a server that refuses all new requests may
        go on with it.
        """
        ejection = self._ejected.get(key) if self._ejected else None
        if ejection is not None and ejection.number <= failures_before:
            del self._ejected[key]

    def without(self, candidates: Sequence[K], *, failed_it: frozenset[ReplicaKey], now_s: float) -> list[K]:
        """The candidates that a request may take; `failed_it` are those that have failed this very request."""
        good: list[K] = []
        erring: list[K] = []
        for candidate in candidates:
            ejection = self._ejected.get(candidate.key)
            if ejection is None or now_s >= ejection.until_s:
                good.append(candidate)
            elif not ejection.unreachable and candidate.key not in failed_it:
                erring.append(candidate)
        return good or erring
