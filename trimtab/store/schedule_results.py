"""What came of a scaling request: written by the pre-scheduler, read by the policy engine too."""

from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.api.store.v1 import prescheduler_pb2
from trimtab.store.message_codec import Rules
from trimtab.store.message_forms import ValueCodec, bare, message_form
from trimtab.store.records import RecordKind

PLACEMENT_IDS = {
    "trimtab.scheduler.v1.GroupPlacement": ("cluster", "group"),
    "trimtab.scheduler.v1.ReplicaPlacement": ("replica",),
    "trimtab.scheduler.v1.ScaleIn": ("role",),
}
"""What tells placements of a result apart."""


def result_without_schema(raw: bytes) -> scheduler_pb2.ScalingResult:
    """A result as releases before schema numbers wrote it: the bare message. Raises ``ValueError``."""
    result = bare(scheduler_pb2.ScalingResult.FromString(raw))
    if not result.service:
        raise ValueError("names no service")
    return result


SCHEDULE_RESULT = RecordKind(
    name="scheduling result",
    schema=1,
    codec=ValueCodec(
        scheduler_pb2.ScalingResult,
        prescheduler_pb2.ScheduleResultRecord,
        Rules(forms={scheduler_pb2.ScalingResult: message_form(scheduler_pb2.ScalingResult, PLACEMENT_IDS)}),
    ),
    removing="the next cycle writes what it finds",
    legacy=result_without_schema,
)
