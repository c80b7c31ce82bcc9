"""Messages of other packages inside a stored record: each is stored as it is, with its unknown fields kept.

form = message_form(scheduler_pb2.ScalingResult, {"trimtab.scheduler.v1.GroupPlacement": ("cluster", "group")})
record_codec(StoredResult, prescheduler_pb2.ScheduleResultRecord, Rules(forms={scheduler_pb2.ScalingResult: form}))
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from trimtab.store.message_fields import Form, by_fields, known_bytes

M = TypeVar("M", bound=Message)

Ids = Mapping[str, tuple[str, ...]]
"""Full name of a message in a repeated field → the fields that tell its elements apart."""


def message_form(message_type: type[Message], ids: Ids | None = None) -> Form:
    """The form of a message that is a value itself. Elements of messages without ``ids`` are matched by equality."""
    known = ids or {}
    return Form(message=message_type, write=lambda value, target: overwrite(target, value, known), read=bare)


def bare(message: M) -> M:
    """A copy without unknown fields. Raises ``ValueError`` for an enum member that this release does not have."""
    copy = type(message)()
    copy.CopyFrom(message)
    cast("Any", copy).DiscardUnknownFields()
    _check_enums(copy, "")
    return copy


def has_unknown_fields(message: Message) -> bool:
    """Whether it holds anything that this release does not know."""
    return known_bytes(message) != message.SerializeToString(deterministic=True)


def overwrite(target: Any, source: Any, ids: Ids) -> None:
    """Set every known field of ``target`` to what ``source`` has; unknown fields of ``target`` stay."""
    for field in target.DESCRIPTOR.fields:
        name, entry = field.name, field.message_type
        if field.is_repeated and entry is not None and not entry.GetOptions().map_entry:
            _overwrite_list(getattr(target, name), getattr(source, name), entry, ids)
        elif field.is_repeated:
            target.ClearField(name)
            getattr(target, name).MergeFrom(getattr(source, name))
        elif field.has_presence and not source.HasField(name):
            target.ClearField(name)
        elif entry is not None:
            getattr(target, name).SetInParent()
            overwrite(getattr(target, name), getattr(source, name), ids)
        else:
            setattr(target, name, getattr(source, name))


def _overwrite_list(target: Any, source: Any, entry: Any, ids: Ids) -> None:
    names = ids.get(entry.full_name)
    identify = by_fields([entry.fields_by_name[name] for name in names]) if names else known_bytes
    before: dict[object, list[Message]] = defaultdict(list)
    for element in reversed(target):
        before[identify(element)].append(element)
    written = []
    for item in source:
        element = type(item)()
        matching = before[identify(item)]
        if matching:
            element.CopyFrom(matching.pop())
        overwrite(element, item, ids)
        written.append(element)
    del target[:]
    target.extend(written)


def _check_enums(message: Any, path: str) -> None:
    for field, value in message.ListFields():
        place = f"{path}{field.name}"
        if field.enum_type is not None:
            for number in value if field.is_repeated else (value,):
                if number not in field.enum_type.values_by_number:
                    raise ValueError(f"{place}: {number} is no {field.enum_type.name} of this release")
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for item in value if field.is_repeated else (value,):
                _check_enums(item, f"{place}.")
