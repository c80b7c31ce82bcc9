"""Scrape targets: the state of each, and what went wrong last."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from trimtab.api.collector.v1 import collector_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.views.text import short_name, time_text

# A server that is new or asleep is as it should be.
_FINE = (
    collector_pb2.TARGET_STATE_UP,
    collector_pb2.TARGET_STATE_ASLEEP,
    collector_pb2.TARGET_STATE_PENDING,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRow:
    """One target. `fine` is False when an operator should act on it."""

    target_id: str
    service: str
    role: str
    address: str
    source: str
    counted: bool
    state: str
    fine: bool
    last_success: str
    last_error: str


def target_row(target: collector_pb2.Target) -> TargetRow:
    """One target as people read it."""
    return TargetRow(
        target_id=target.target_id,
        service=target.service,
        role=short_name(types_pb2.Role.Name(target.role), "ROLE_"),
        address=target.address,
        source=target.source,
        counted=target.counted,
        state=short_name(collector_pb2.TargetState.Name(target.state), "TARGET_STATE_"),
        fine=target.state in _FINE,
        last_success=time_text(target.last_success_time),
        last_error=target.last_error,
    )


def failing(targets: Iterable[collector_pb2.Target], starting: Collection[str] = ()) -> list[collector_pb2.Target]:
    """Those that need an operator's attention; a server that is `starting` is expected not to answer yet."""
    return [target for target in targets if target.state not in _FINE and not _not_up_yet(target, starting)]


def _not_up_yet(target: collector_pb2.Target, starting: Collection[str]) -> bool:
    return target.state == collector_pb2.TARGET_STATE_DOWN and target.replica in starting


def describe_target(target: collector_pb2.Target) -> str:
    """One line: which and why."""
    row = target_row(target)
    return f"{row.target_id} ({row.service or 'no service'}, {row.address}) is {row.state}: {row.last_error}"
