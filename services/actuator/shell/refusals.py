"""Refused records at the edge: what can be read of their bytes, and the errors that callers get."""

import json
from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from actuator.core.fencing import Refused as RefusedWrite
from actuator.core.held import REASON
from actuator.core.model import Gpu
from actuator.core.refused import RefusedKind, RefusedRecord
from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.rpc.errors import FailedPrecondition, NotFound, RpcError, Unavailable
from trimtab.store.records import RecordKind, Refused

_PLACED_FIELDS = {"spec": ("pool", "group"), "placement": ("node", "gpu_indices")}


def refused_record(kind: RefusedKind, refused: Refused, records: RecordKind[Any]) -> RefusedRecord:
    """The record as the core knows it.

    GPUs, pool and group are taken from undamaged bytes alone: of a newer release, or with one field that is none. An
    operation's subject is taken from damaged ones too, and then uncertain.
    """
    message = records.undamaged(refused.raw) or _from_json(refused.raw, records)
    certain = message is not None
    message = message if message is not None else records.damaged(refused.raw)
    gpus: tuple[Gpu, ...] | None = None
    pool = group = subject = ""
    if kind is RefusedKind.OPERATION:
        subject = message.subject
    elif kind is RefusedKind.POOL and certain:
        gpus = _gpus(item.placement for item in message.overlay)
    elif kind is RefusedKind.REPLICA and certain:
        gpus = _gpus([message.placement])
        pool, group = message.spec.pool, message.spec.group
    return RefusedRecord(
        kind=kind,
        name=refused.field,
        reason=refused.reason.value,
        why=f"{refused.key}, field {refused.field}: {refused.why}",
        remedy=refused.remedy,
        gpus=gpus,
        pool=pool,
        group=group,
        subject=subject,
        subject_certain=certain and bool(subject),
    )


def error_of(refused: RefusedWrite) -> RpcError:
    """How a write that the core refuses reaches its caller.

    What is held for a refused record is UNAVAILABLE: the same call succeeds once an operator has seen to the record.
    """
    if refused.reason == "NOT_FOUND":
        return NotFound(refused.reason, refused.message)
    if refused.reason == REASON:
        return Unavailable(refused.reason, refused.message, refused.detail)
    return FailedPrecondition(refused.reason, refused.message, refused.detail)


def refused_to_proto(record: RefusedRecord) -> pb.RefusedRecord:
    """The message of one refused record."""
    return pb.RefusedRecord(
        kind=pb.RecordKind.Value(f"RECORD_KIND_{record.kind.name}"),
        name=record.name,
        fault=pb.RecordFault.Value(f"RECORD_FAULT_{record.reason.upper()}"),
        detail=record.why,
        remedy=record.remedy,
    )


def _gpus(placements: Iterable[Any]) -> tuple[Gpu, ...] | None:
    """The GPUs of placements; None when one names none, which another release may have written elsewhere."""
    found = list(placements)
    if not found or any(not item.node or not item.gpu_indices for item in found):
        return None
    return tuple(sorted({(item.node, index) for item in found for index in item.gpu_indices}))


def _from_json(raw: bytes, records: RecordKind[Any]) -> Any | None:
    """The same fields of a record of before schemas; None when it is no JSON or they are not what they should be."""
    try:
        told = json.loads(raw)
        fields: dict[str, Any] = {"subject": told["subject"]} if "subject" in told else {}
        if "spec" in told:
            fields |= _placed(told["spec"])
        if "overlay" in told:
            fields["overlay"] = [_placed(spec) for spec in told["overlay"]]
        return ParseDict(fields, records.codec.message_type())
    except (ValueError, TypeError, AttributeError, RecursionError, ParseError):
        return None


def _placed(told: dict[str, Any]) -> dict[str, Any]:
    """What those releases kept in one object, in the two messages of today."""
    return {part: {name: told[name] for name in names if name in told} for part, names in _PLACED_FIELDS.items()}
