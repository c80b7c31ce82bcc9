"""Records around one value, and messages of other packages as such values.

    form = message_form(scheduler_pb2.ScalingResult, {"trimtab.scheduler.v1.GroupPlacement": ("cluster", "group")})
    rules = Rules(forms={scheduler_pb2.ScalingResult: form})
    codec = ValueCodec(scheduler_pb2.ScalingResult, prescheduler_pb2.ScheduleResultRecord, rules)

A message is stored as it is. A rewrite sets what this release knows of it and keeps the rest.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from trimtab.store.message_codec import Codec, Rules
from trimtab.store.message_fields import Form, by_fields, known_bytes
from trimtab.store.records import CHECKSUM_FIELD, SCHEMA_FIELD, record_codec

M = TypeVar("M", bound=Message)
V = TypeVar("V")

Ids = Mapping[str, tuple[str, ...]]
"""Full name of a message in a repeated field → the fields that tell its elements apart."""


class ValueCodec(Codec[V]):
    """The codec of a record that holds one value: beside schema and checksum its message has one field.

    Raises ``SchemaMismatch``, and ``ValueError`` for a message with another number of fields.
    """

    def __init__(self, value_type: type[V], message_type: type[Message], rules: Rules | None = None) -> None:
        names = [field.name for field in message_type.DESCRIPTOR.fields]
        own = [name for name in names if name not in (SCHEMA_FIELD, CHECKSUM_FIELD)]
        if len(own) != 1:
            raise ValueError(f"{message_type.DESCRIPTOR.full_name} has {len(own)} fields of its own, not one")
        self.value_type = value_type
        self.message_type = message_type
        self._name = own[0]
        self._holder: Any = dataclasses.make_dataclass("Holder", [(self._name, value_type)], frozen=True)
        self._codec: Codec[Any] = record_codec(self._holder, message_type, rules)

    def write(self, value: V, onto: Message | None = None) -> Any:
        """A message with the value, and with what ``onto`` has beside it. Raises ``ValueError``, naming the field."""
        return self._codec.write(self._holder(value), onto)

    def read(self, message: Message) -> V:
        """The value. Raises ``Unreadable``."""
        return cast("V", getattr(self._codec.read(message), self._name))


def message_form(message_type: type[Message], ids: Ids | None = None) -> Form:
    """The form of a message that is a value itself. Elements of messages without ``ids`` are matched by equality."""
    known = ids or {}
    return Form(message=message_type, write=lambda value, target: overwrite(target, value, known), read=bare)


def domain_form(message_type: type[M], write: Callable[[V], M], read: Callable[[M], V], ids: Ids | None = None) -> Form:
    """The form of a value that has a codec to a message of another package: ``write`` and ``read`` are that codec."""
    known = ids or {}
    return Form(
        message=message_type,
        write=lambda value, target: overwrite(target, write(value), known),
        read=lambda message: read(bare(message)),
    )


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
