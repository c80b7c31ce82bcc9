"""Decisions computed again: a record keeps the whole input of its core, and replaying it gives the same record.

The input is a stored record of its own kind, with a schema number. An input that this release cannot run is shown and
not replayed; `ReplayError` says which schema it is of.
"""

from __future__ import annotations

from dataclasses import dataclass

from policy_engine.core.decision import CoreInput, RecordHeader, assemble, run_core
from policy_engine.core.pool.decide import PoolInput
from policy_engine.core.pool.initial_layout import LayoutInput
from policy_engine.core.scaled.decide import ScaledInput
from policy_engine.core.shared.draft import Draft
from policy_engine.shell.state_records import RULES
from trimtab.api.policy.v1 import decision_pb2
from trimtab.api.store.v1 import engine_pb2
from trimtab.store import keys
from trimtab.store.records import RecordKind, Refused, RefusedReason, record_codec


class ReplayError(ValueError):
    """A decision's input is not one that this release can run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayInput:
    """The input of exactly one of the cores."""

    scaled: ScaledInput | None = None
    pool: PoolInput | None = None
    layout: LayoutInput | None = None

    def __post_init__(self) -> None:
        """Raises ValueError unless it is one."""
        if sum(item is not None for item in (self.scaled, self.pool, self.layout)) != 1:
            raise ValueError("holds the input of no core, or of several")


REPLAY_INPUT = RecordKind(
    name="replay input",
    schema=1,
    codec=record_codec(ReplayInput, engine_pb2.ReplayRecord, RULES),
    removing="the decision is shown, and not replayed",
)


def encode_input(given: CoreInput, previous: bytes | None = None) -> bytes:
    """A core's input as a record; unknown fields of `previous` stay."""
    if isinstance(given, ScaledInput):
        return REPLAY_INPUT.encode(ReplayInput(scaled=given), previous)
    if isinstance(given, PoolInput):
        return REPLAY_INPUT.encode(ReplayInput(pool=given), previous)
    return REPLAY_INPUT.encode(ReplayInput(layout=given), previous)


def decode_input(record: decision_pb2.Decision) -> CoreInput:
    """The input that a decision was made from. Raises ReplayError."""
    if not record.replay and record.replay_input:
        raise ReplayError(
            "the input is of schema 0 (JSON), from before inputs had schema numbers: it is shown and not replayed"
        )
    if not record.replay:
        raise ReplayError("its input is not kept")
    found = REPLAY_INPUT.decode(record.replay, key=keys.decision_inputs(), field=record.decision_id)
    if isinstance(found, Refused):
        detail = "it is shown and not replayed" if found.reason == RefusedReason.NEWER else found.remedy
        raise ReplayError(f"{found.key}, field {found.field}: {found.why}; {detail}")
    given = found.scaled or found.pool or found.layout
    assert given is not None  # noqa: S101 - ReplayInput holds exactly one; this tells mypy
    return given


def record_of(
    draft: Draft, given: CoreInput, header: RecordHeader, *, previous: bytes | None = None
) -> decision_pb2.Decision:
    """The record of a draft with the input that it was made from, without an outcome.

    `previous`: the input as it was kept, whose unknown fields stay.
    """
    record = assemble(draft, header)
    record.replay = encode_input(given, previous)
    return record


def replay(record: decision_pb2.Decision) -> decision_pb2.Decision:
    """The record computed again from its input. Raises ReplayError when that cannot be run."""
    given = decode_input(record)
    draft = run_core(given)
    if draft is None:
        raise ReplayError("from this input the engine would record nothing")
    header = RecordHeader(
        decision_id=record.decision_id,
        decide_time=record.decide_time,
        fencing_writer=record.fencing.writer,
        fencing_token=record.fencing.token,
        replica_revisions=tuple(sorted(record.replica_revisions.items())),
        resource_etags=tuple(sorted(record.resource_etags.items())),
    )
    again = record_of(draft, given, header, previous=record.replay)
    if record.HasField("outcome"):
        again.outcome.CopyFrom(record.outcome)
    return again
