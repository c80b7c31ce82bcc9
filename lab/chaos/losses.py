"""Whose a lost request is: the injected fault's or Trimtab's. Pure.

The rule. A request is lost when its client did not get its whole answer, with the very text that its prompt leads to.
A lost request is the *fault's* when the gateway noted at least one failure of it, when each of them was at a server
that an injected fault held at that moment (from the injection until `GRACE_S` after it was over: healed, or running
again after a kill), and when no eviction of Trimtab's had used its one reissue up. Every other lost request is
*Trimtab's*: a failure at a healthy server, no routable server in time, an aborted, short or garbled answer, a time-out,
a connection to the gateway that broke.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from simulator.replay.report import Outcome, RequestRecord

GRACE_S = 3.0
EVICTED = "evicted"
_EVENTS = ("request is reissued", "request failed")
_BY_SERVERS = (Outcome.HTTP_ERROR, Outcome.STREAM_ERROR)


@dataclass(frozen=True, slots=True)
class Trouble:
    """An injected fault of one server. Unix seconds; `until_s` is None while it lasts."""

    replica: str
    kind: str
    since_s: float
    until_s: float | None = None

    def held(self, replica: str, at_s: float) -> bool:
        """Whether it held the server at a moment."""
        over_s = float("inf") if self.until_s is None else self.until_s + GRACE_S
        return self.replica == replica and self.since_s <= at_s <= over_s


@dataclass(frozen=True, slots=True)
class Failure:
    """What a gateway noted of one request. `replica` is empty for an eviction, which is no server's failure."""

    at_s: float
    replica: str
    cause: str


@dataclass(frozen=True, slots=True)
class Loss:
    """A lost request, and why it is whose."""

    request_id: str
    service: str
    outcome: str
    detail: str
    of_fault: bool
    why: str


def read_failures(lines: Iterable[str]) -> dict[str, list[Failure]]:
    """Request id → its failures in order, from the gateway's log; lines that are something else are passed over."""
    found: dict[str, list[Failure]] = {}
    for line in lines:
        if not any(event in line for event in _EVENTS):
            continue
        try:
            said = json.loads(line)
            at_s = datetime.datetime.fromisoformat(said["time"]).timestamp()
            error, request_id = str(said["upstream_error"]), str(said["request_id"])
        except (ValueError, KeyError, TypeError):
            continue
        replica, separator, cause = error.partition(": ")
        failure = Failure(at_s, replica if separator else "", cause if separator else error)
        found.setdefault(request_id, []).append(failure)
    return found


def judge(
    records: Sequence[RequestRecord],
    failures: Mapping[str, Sequence[Failure]],
    troubles: Sequence[Trouble],
    *,
    id_prefix: str,
) -> list[Loss]:
    """Every lost request by the rule above, in order of arrival."""
    losses = []
    for record in records:
        if record.outcome is Outcome.OK:
            continue
        request_id = f"{id_prefix}{record.index}"
        of_fault, why = _whose(record, failures.get(request_id, ()), troubles)
        losses.append(Loss(request_id, record.service, record.outcome.value, record.detail, of_fault, why))
    return losses


def _whose(record: RequestRecord, failures: Sequence[Failure], troubles: Sequence[Trouble]) -> tuple[bool, str]:
    if record.outcome not in _BY_SERVERS:
        return False, f"{record.outcome.value} is never a server's fault alone"
    if not failures:
        return False, "the gateway noted no failure of a server"
    said = []
    for failure in failures:
        if not failure.replica:
            return False, f"its one reissue went to: {failure.cause}"
        held = [trouble for trouble in troubles if trouble.held(failure.replica, failure.at_s)]
        if not held:
            return False, f"{failure.replica} failed it without a fault: {failure.cause}"
        said.append(f"{failure.replica} ({held[0].kind})")
    return True, "each server that had it was held by a fault: " + ", ".join(said)
