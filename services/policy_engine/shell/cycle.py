"""The inputs of one cycle of the engine's loop, and the writer of its decisions and states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policy_engine.core.decision import CoreInput, RecordHeader
from policy_engine.core.shared.draft import Draft
from policy_engine.core.shared.vocabulary import DecisionKind
from policy_engine.shell.catalog import Snapshot
from policy_engine.shell.observe import Observed
from policy_engine.shell.records import Command, DecisionLog, IdSource, with_outcome
from policy_engine.shell.replay import record_of
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2
from trimtab.domain.time import timestamp_of
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.lease import fenced_write

# Lua unpacks one command at a time; this bounds the size of one script call.
MAX_COMMANDS = 500


@dataclass(frozen=True)
class Cycle:
    """One cycle. `token` is the leader's fencing token; None for a follower, which computes and writes nothing."""

    now_s: float
    token: int | None
    snapshot: Snapshot
    observed: Observed

    def fencing(self) -> types_pb2.Fencing:
        """What goes with every write to another service."""
        return types_pb2.Fencing(writer=keys.POLICY_ENGINE, token=self.token or 0)


class Writer:
    """Records and states of a cycle, in one fenced step: a decision is in the store before anything acts on it."""

    def __init__(self, store: Store, log: DecisionLog, *, on_record: Callable[[decision_pb2.Decision], None]) -> None:
        self._store = store
        self._log = log
        self._on_record = on_record
        self._ids = IdSource()

    def record(
        self,
        draft: Draft,
        given: CoreInput,
        cycle: Cycle,
        *,
        revisions: Sequence[tuple[str, int]],
        etags: Sequence[tuple[str, str]],
    ) -> decision_pb2.Decision:
        """The record of a draft, with its first outcome."""
        header = RecordHeader(
            decision_id=self._ids.next(cycle.now_s),
            decide_time=timestamp_of(cycle.now_s),
            fencing_writer=keys.POLICY_ENGINE,
            fencing_token=cycle.token or 0,
            replica_revisions=tuple(revisions),
            resource_etags=tuple(etags),
        )
        hold = draft.kind == DecisionKind.HOLD
        state = decision_pb2.OUTCOME_STATE_NONE if hold else decision_pb2.OUTCOME_STATE_PENDING
        record = with_outcome(record_of(draft, given, header), state, now_s=cycle.now_s)
        self._on_record(record)
        return record

    async def commit(
        self, cycle: Cycle, *, records: Sequence[decision_pb2.Decision] = (), commands: Sequence[Command] = ()
    ) -> None:
        """Write, or raise FencedOff or StoreUnavailable. A follower writes nothing."""
        if cycle.token is None:
            return
        everything = [*self._log.commands(records), *commands]
        for start in range(0, len(everything), MAX_COMMANDS):
            await fenced_write(self._store, keys.POLICY_ENGINE, cycle.token, everything[start : start + MAX_COMMANDS])
        if records:
            self._log.wrote(records)
