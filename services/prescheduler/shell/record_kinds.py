"""The pre-scheduler's stored records: results, groups, cycles and answers, each with a schema number of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

from prescheduler.core.model import ServiceResult
from prescheduler.shell import codec
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.api.store.v1 import prescheduler_pb2
from trimtab.store.message_codec import Form, Rules
from trimtab.store.message_forms import ValueCodec, bare, message_form, overwrite
from trimtab.store.records import RecordKind
from trimtab.store.schedule_results import PLACEMENT_IDS, SCHEDULE_RESULT, result_without_schema

M = TypeVar("M", bound=Message)


def _bare_message(message_type: type[M], *required: str) -> Callable[[bytes], M]:
    """A reader of what releases before schema numbers wrote: the bare message. It raises ``ValueError``."""

    def read(raw: bytes) -> M:
        message = bare(message_type.FromString(raw))
        present = {field.name for field, _ in message.ListFields()}
        missing = [name for name in required if name not in present]
        if missing:
            raise ValueError(f"names no {missing[0]}")
        return message

    return read


RESULT: RecordKind[ServiceResult] = RecordKind(
    name=SCHEDULE_RESULT.name,
    schema=SCHEDULE_RESULT.schema,
    codec=ValueCodec(
        ServiceResult,
        prescheduler_pb2.ScheduleResultRecord,
        Rules(
            forms={
                ServiceResult: Form(
                    message=scheduler_pb2.ScalingResult,
                    write=lambda result, message: overwrite(message, codec.result_to_wire(result), PLACEMENT_IDS),
                    read=lambda message: codec.result_from_wire(bare(message)),
                )
            }
        ),
    ),
    removing=SCHEDULE_RESULT.removing,
    upgrades=SCHEDULE_RESULT.upgrades,
    legacy=lambda raw: codec.result_from_wire(result_without_schema(raw)),
)
GROUP: RecordKind[scheduler_pb2.DeploymentGroup] = RecordKind(
    name="Deployment Group",
    schema=1,
    codec=ValueCodec(
        scheduler_pb2.DeploymentGroup,
        prescheduler_pb2.DeploymentGroupRecord,
        Rules(
            forms={
                scheduler_pb2.DeploymentGroup: message_form(
                    scheduler_pb2.DeploymentGroup, {"trimtab.scheduler.v1.RoleReplicas": ("role",)}
                )
            }
        ),
    ),
    removing="the group is listed again by its cluster",
    legacy=_bare_message(scheduler_pb2.DeploymentGroup, "group", "service", "cluster"),
)
CYCLE: RecordKind[scheduler_pb2.Cycle] = RecordKind(
    name="cycle",
    schema=1,
    codec=ValueCodec(
        scheduler_pb2.Cycle,
        prescheduler_pb2.CycleRecord,
        Rules(forms={scheduler_pb2.Cycle: message_form(scheduler_pb2.Cycle)}),
    ),
    removing="watchers do not see it",
    legacy=_bare_message(scheduler_pb2.Cycle, "cycle_id"),
)
ANSWER: RecordKind[scheduler_pb2.ScheduleResponse] = RecordKind(
    name="answer",
    schema=1,
    codec=ValueCodec(
        scheduler_pb2.ScheduleResponse,
        prescheduler_pb2.ScheduleAnswerRecord,
        Rules(forms={scheduler_pb2.ScheduleResponse: message_form(scheduler_pb2.ScheduleResponse)}),
    ),
    removing="the call is carried out once more",
    legacy=_bare_message(scheduler_pb2.ScheduleResponse, "cycle"),
)
