"""Messages inside records: what this release knows is set, what it does not know stays."""

import pytest

from tests.support.records import UNKNOWN, has_unknown_field
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.api.store.v1 import actuator_pb2 as actuator_records
from trimtab.api.store.v1 import prescheduler_pb2
from trimtab.store.message_codec import Rules
from trimtab.store.message_forms import ValueCodec, bare, has_unknown_fields, message_form, overwrite

IDS = {
    "trimtab.scheduler.v1.GroupPlacement": ("cluster", "group"),
    "trimtab.scheduler.v1.ReplicaPlacement": ("replica",),
}


def result_of(*groups: str, detail: str = "") -> scheduler_pb2.ScalingResult:
    return scheduler_pb2.ScalingResult(
        service="chat",
        detail=detail,
        groups=[
            scheduler_pb2.GroupPlacement(
                group=name, cluster="a", add=[scheduler_pb2.ReplicaPlacement(replica=f"{name}-0")]
            )
            for name in groups
        ],
    )


def test_known_fields_become_those_of_the_source():
    target = result_of("g-0", "g-1", detail="before")
    source = result_of("g-1", "g-2")
    overwrite(target, source, IDS)
    assert target == source


def test_maps_and_fields_with_presence_are_taken_too():
    target = scheduler_pb2.Cycle(cycle_id="c-1", inventory_revisions={"a": 1, "b": 2})
    target.cycle_time.GetCurrentTime()
    source = scheduler_pb2.Cycle(cycle_id="c-2", inventory_revisions={"a": 3}, duration_s=0.5)
    overwrite(target, source, {})
    assert target == source
    assert not target.HasField("cycle_time")


@pytest.mark.parametrize("depth", ["message", "element", "element of an element"])
def test_unknown_fields_stay_with_what_they_belong_to(depth):
    target = result_of("g-0", "g-1")
    part = {"message": target, "element": target.groups[1], "element of an element": target.groups[1].add[0]}[depth]
    part.MergeFromString(UNKNOWN)
    overwrite(target, result_of("g-1", "g-0", detail="other"), IDS)
    assert has_unknown_field(target)
    assert bare(target) == result_of("g-1", "g-0", detail="other")
    assert has_unknown_field(target.groups[0]) is (depth != "message")
    assert not has_unknown_field(target.groups[1])
    overwrite(target, result_of("g-0"), IDS)
    assert has_unknown_field(target) is (depth == "message"), "an element that is gone takes it along"


def test_a_copy_has_nothing_unknown():
    message = result_of("g-0")
    message.groups[0].MergeFromString(UNKNOWN)
    assert has_unknown_fields(message)
    assert not has_unknown_fields(bare(message))


def test_a_member_of_an_enum_that_this_release_does_not_have_is_an_error():
    message = result_of("g-0")
    message.groups[0].add[0].role = 99
    with pytest.raises(ValueError, match=r"groups\.add\.role: 99 is no Role of this release"):
        bare(message)


def test_a_record_around_one_value():
    form = message_form(scheduler_pb2.ScalingResult, IDS)
    codec = ValueCodec(
        scheduler_pb2.ScalingResult,
        prescheduler_pb2.ScheduleResultRecord,
        Rules(forms={scheduler_pb2.ScalingResult: form}),
    )
    message = codec.write(result_of("g-0"))
    assert codec.read(message) == result_of("g-0")
    message.MergeFromString(UNKNOWN)
    assert has_unknown_field(codec.write(result_of("g-1"), onto=message))


def test_a_record_of_several_values_has_no_such_codec():
    with pytest.raises(ValueError, match="fields of its own, not one"):
        ValueCodec(str, actuator_records.ReplicaRecord)
