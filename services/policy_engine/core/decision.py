"""Decision records: assembled from a draft, compared, and explained in lines.

The same input and header give the same record, bit for bit; `policy_engine.shell.replay` keeps the input with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from policy_engine.core.pool.decide import PoolInput, decide_pool
from policy_engine.core.pool.initial_layout import LayoutInput, lay_out
from policy_engine.core.scaled.decide import ScaledInput, decide_scaled
from policy_engine.core.shared.draft import Draft, ReplicaChange
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2
from trimtab.domain.measurement import measurement_to_proto
from trimtab.domain.vocabulary import Role

CoreInput = ScaledInput | PoolInput | LayoutInput


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record has beside its substance."""

    decision_id: str
    decide_time: Timestamp
    fencing_writer: str
    fencing_token: int
    replica_revisions: tuple[tuple[str, int], ...] = ()
    resource_etags: tuple[tuple[str, str], ...] = ()


def run_core(given: CoreInput) -> Draft | None:
    """The draft that the core makes of this input; None when it would record nothing."""
    if isinstance(given, ScaledInput):
        return decide_scaled(given).draft
    if isinstance(given, PoolInput):
        return decide_pool(given).draft
    return lay_out(given).draft


def assemble(draft: Draft, header: RecordHeader) -> decision_pb2.Decision:
    """The record, without an outcome and without the input that it was made from."""
    record = decision_pb2.Decision(
        decision_id=header.decision_id,
        kind=decision_pb2.DecisionKind.Value(f"DECISION_KIND_{draft.kind.value}"),
        subject=draft.subject,
        rule=decision_pb2.Rule.Value(f"RULE_{draft.rule.value}"),
        reason=draft.reason,
        fencing=types_pb2.Fencing(writer=header.fencing_writer, token=header.fencing_token),
    )
    record.decide_time.CopyFrom(header.decide_time)
    for item in draft.inputs:
        record.inputs.add(name=item.name, unit=item.unit, measurement=measurement_to_proto(item.signal))
    for clamp in draft.clamps:
        record.clamps.add(
            kind=decision_pb2.ClampKind.Value(f"CLAMP_KIND_{clamp.kind.value}"),
            before=clamp.before,
            after=clamp.after,
            detail=clamp.detail,
        )
    for change in draft.counts:
        record.counts.add(
            service=change.service, role=role_value(change.role), before=change.before, after=change.after
        )
    if draft.transition is not None:
        record.transition.releases.extend(_replica_change(item) for item in draft.transition.releases)
        record.transition.wakes.extend(_replica_change(item) for item in draft.transition.wakes)
    for candidate in draft.candidates:
        record.candidates.add(
            receiver=candidate.receiver, donor=candidate.donor, taken=candidate.taken, reason=candidate.reason
        )
    record.replica_revisions.update(dict(header.replica_revisions))
    record.resource_etags.update(dict(header.resource_etags))
    return record


def _replica_change(item: ReplicaChange) -> decision_pb2.ReplicaChange:
    return decision_pb2.ReplicaChange(
        replica=item.replica, service=item.service, role=role_value(item.role), gpus=item.gpus
    )


def role_value(role: Role) -> types_pb2.Role.ValueType:
    """A role on the wire."""
    return types_pb2.Role.Value(f"ROLE_{role.value.upper().replace('-', '_')}")


def same(one: decision_pb2.Decision, other: decision_pb2.Decision) -> bool:
    """Whether two records are equal, bit for bit."""
    return one.SerializeToString(deterministic=True) == other.SerializeToString(deterministic=True)


def explain(record: decision_pb2.Decision) -> list[str]:
    """The record as lines of text for people."""
    rule = decision_pb2.Rule.Name(record.rule).removeprefix("RULE_").lower().replace("_", " ")
    kind = decision_pb2.DecisionKind.Name(record.kind).removeprefix("DECISION_KIND_").lower().replace("_", " ")
    lines = [
        f"{record.decision_id}  {_time_words(record.decide_time)}  {kind} of {record.subject}",
        f"rule: {rule}",
        f"reason: {record.reason}",
    ]
    for count in record.counts:
        role = types_pb2.Role.Name(count.role).removeprefix("ROLE_").lower()
        lines.append(f"count: {count.service} {role} {count.before} → {count.after}")
    for word, changes in (("release", record.transition.releases), ("wake", record.transition.wakes)):
        lines += [f"{word}: {item.replica} ({item.gpus} GPU{'' if item.gpus == 1 else 's'})" for item in changes]
    for clamp in record.clamps:
        words = decision_pb2.ClampKind.Name(clamp.kind).removeprefix("CLAMP_KIND_").lower().replace("_", " ")
        lines.append(
            f"clamp: {words}: {clamp.before:g} → {clamp.after:g}" + (f", {clamp.detail}" if clamp.detail else "")
        )
    lines += [_input_line(item) for item in record.inputs]
    for candidate in record.candidates:
        verdict = "taken" if candidate.taken else "left"
        source = candidate.donor or "idle GPUs"
        lines.append(f"candidate: {candidate.receiver} ← {source}: {verdict}, {candidate.reason}")
    state = (
        decision_pb2.OutcomeState.Name(record.outcome.state).removeprefix("OUTCOME_STATE_").lower().replace("_", " ")
    )
    lines.append(f"outcome: {state}" + (f": {record.outcome.detail}" if record.outcome.detail else ""))
    lines += [f"operation: {operation_id}" for operation_id in record.outcome.operation_ids]
    return lines


def _time_words(time: Timestamp) -> str:
    """To the millisecond."""
    shown = Timestamp()
    shown.FromMilliseconds(time.ToMilliseconds())
    return shown.ToJsonString()


def _input_line(item: decision_pb2.DecisionInput) -> str:
    quality = types_pb2.Quality.Name(item.measurement.quality).removeprefix("QUALITY_").lower()
    if item.measurement.quality == types_pb2.QUALITY_PARTIAL:
        quality = f"partial {item.measurement.reported} of {item.measurement.expected}"
    value = f"{item.measurement.value:.4g} {item.unit}" if item.measurement.HasField("value") else "–"
    detail = f" ({item.measurement.detail})" if item.measurement.detail else ""
    return f"input: {item.name} = {value}, {quality}{detail}"
