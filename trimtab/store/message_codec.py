"""A codec between frozen dataclasses and protobuf messages, compiled from type hints and the message's descriptor.

    codec = Codec(Replica, actuator_pb2.Replica, ids={Hold: ("owner",)})
    message = codec.write(replica, onto=previous)
    replica = codec.read(message)

Fields correspond by name. What corresponds to what:

    bool, int, str, bytes, float      scalar of that kind (float: double alone; NaN and infinities are errors)
    Enum                              enum, member ``A_B`` of type ``Kind`` to ``KIND_A_B``; or the scalar of its values
    Literal                           scalar of its values
    X | None                          field with presence
    dataclass, NamedTuple             message
    tuple[X, ...], Sequence[X]        repeated field
    frozenset[X]                      repeated field, sorted
    Mapping[K, V]                     map; or, where order counts, repeated message of two fields: key, then value
    tuple[X, Y]                       message of as many fields, in the order of their numbers
    anything, where a message stands  message of one field (in lists of lists, say, or lists of optional values)

A field without a counterpart, or with one of another kind, is a ``SchemaMismatch`` when the codec is made.

``write`` changes a copy of the previous message, so that fields that this release does not know survive. Elements of
a repeated field are matched by the fields that ``ids`` names for their type, ``spec.replica`` being one of a message
within; with ``()``, by equality of all that is known of them. Map entries are matched by key.
"""

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from trimtab.store.message_fields import (
    Accessor,
    Converter,
    Entry,
    Form,
    Formed,
    Inside,
    Items,
    LeafField,
    LeafList,
    MapField,
    MessageField,
    MessageList,
    Positions,
    Struct,
    Wrapped,
    by_fields,
    by_paths,
    known_bytes,
)
from trimtab.store.message_scalars import Leaf, SchemaMismatch, Unreadable, leaf_of

__all__ = ["Codec", "Compiler", "Form", "Rules", "SchemaMismatch", "Unreadable"]

V = TypeVar("V")

_NOTHING: Mapping[Any, Any] = types.MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What types do not tell.

    ``ids``: for each type in a repeated field, the fields that tell its elements apart. ``names``: by type, fields that
    are stored under another name. ``only_stored``: by full name of a message, fields that values do not have.
    ``only_value``: by type, fields that are not stored (they need a default). ``others``: by type, the map of messages
    that keeps fields without one of their own, by name (they need a default too). ``within``: by type, the message that
    has such fields instead. ``forms``: types with own codecs.
    """

    ids: Mapping[type, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[type, Mapping[str, str]] = field(default_factory=dict)
    only_stored: Mapping[str, frozenset[str]] = field(default_factory=dict)
    only_value: Mapping[type, frozenset[str]] = field(default_factory=dict)
    others: Mapping[type, str] = field(default_factory=dict)
    within: Mapping[type, str] = field(default_factory=dict)
    forms: Mapping[type, Form] = field(default_factory=dict)


class Codec(Generic[V]):
    """Between one value type and one message type. Raises ``SchemaMismatch`` when made."""

    def __init__(self, value_type: type[V], message_type: type[Message], rules: Rules | None = None) -> None:
        self.value_type = value_type
        self.message_type = message_type
        compiler = self._compiler(rules or Rules())
        self._converter = compiler.message(value_type, message_type.DESCRIPTOR, value_type.__name__)

    def _compiler(self, rules: Rules) -> "Compiler":
        return Compiler(rules)

    def write(self, value: V, onto: Message | None = None) -> Any:
        """A message with the value, and with what ``onto`` has beside it. Raises ``ValueError``, naming the field."""
        message = self.message_type()
        if onto is not None:
            message.CopyFrom(onto)
        try:
            self._converter.write(value, message)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.message_type.DESCRIPTOR.name}.{error}") from error
        return message

    def read(self, message: Message) -> V:
        """The value. Raises ``Unreadable``."""
        return cast("V", self._converter.read(message, ""))


# Compilation


class Compiler:
    """Compiles each pair of type and message once, so that types may contain themselves."""

    presence_tells_none = True
    """Whether a value that may be None needs a field with presence."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._structs: dict[tuple[type, str], Struct] = {}

    def message(self, hint: Any, descriptor: Any, place: str) -> Converter:
        """Between a type and a message."""
        form = self.rules.forms.get(hint) if isinstance(hint, type) else None
        if form is not None:
            if form.message.DESCRIPTOR.full_name != descriptor.full_name:
                raise SchemaMismatch(
                    f"{place}: its form is {form.message.DESCRIPTOR.full_name}, not {descriptor.full_name}"
                )
            return Formed(form)
        if _is_struct(hint):
            return self._struct(hint, descriptor, place)
        fields = sorted(descriptor.fields, key=lambda found: found.number)
        parts = get_args(hint)
        if get_origin(hint) is tuple and Ellipsis not in parts:
            if len(parts) != len(fields):
                raise SchemaMismatch(f"{place}: {len(parts)} parts, {descriptor.full_name} has {len(fields)} fields")
            named = zip(parts, fields, strict=True)
            return Positions(tuple((at.name, self._field(part, at, f"{place}.{at.name}")) for part, at in named))
        if len(fields) == 1:
            return Wrapped(self._field(hint, fields[0], f"{place}.{fields[0].name}"))
        raise SchemaMismatch(f"{place}: {hint} cannot be a {descriptor.full_name}")

    def _struct(self, value_type: type, descriptor: Any, place: str) -> Struct:
        known = self._structs.get((value_type, descriptor.full_name))
        if known is not None:
            return known
        struct = self._structs[value_type, descriptor.full_name] = Struct(value_type)
        struct.fields.extend(self.fields(value_type, _fields_of(value_type), descriptor, place))
        return struct

    def fields(
        self, value_type: type, hints: Mapping[str, Any], descriptor: Any, place: str
    ) -> Iterator[tuple[str, str, Accessor]]:
        """Each field of a type with the name of its message's field. Raises ``SchemaMismatch`` where they differ."""
        names = self.rules.names.get(value_type, _NOTHING)
        omitted = self.rules.only_value.get(value_type, frozenset())
        hints = {name: hint for name, hint in hints.items() if name not in omitted}
        stored = descriptor.fields_by_name
        wanted = {names.get(name, name): name for name in hints}
        lacking = set(wanted) - set(stored)
        spare = set(stored) - set(wanted) - self.rules.only_stored.get(descriptor.full_name, frozenset())
        holder = self.rules.others.get(value_type) or self.rules.within.get(value_type)
        inner: Mapping[str, FieldDescriptor] = {}
        if holder is not None:
            spare.discard(holder)
        if value_type in self.rules.others:
            lacking = set()
        elif holder is not None:
            inner = stored[holder].message_type.fields_by_name
            lacking, spare = lacking - set(inner), spare | (set(inner) - set(wanted))
        problems = [f"{value_type.__name__}.{wanted[at]} has no field {at}" for at in sorted(lacking)]
        problems += [f"{descriptor.full_name}.{at} has no field in {value_type.__name__}" for at in sorted(spare)]
        if problems:
            raise SchemaMismatch(f"{place}: {'; '.join(problems)}")
        for name, hint in hints.items():
            at, inside = names.get(name, name), f"{place}.{name}"
            if at in stored or holder is None:
                yield name, at, self._field(hint, stored[at], inside)
            elif at in inner:
                yield name, at, Inside(holder, inner[at], self._field(hint, inner[at], inside))
            else:
                value = stored[holder].message_type.fields_by_name["value"].message_type
                yield name, at, Entry(holder, at, self.message(hint, value, inside))

    def leaf(self, hint: Any, at: FieldDescriptor, place: str) -> Leaf:
        """Between a type and a scalar."""
        return leaf_of(hint, at, place)

    def _field(self, hint: Any, at: FieldDescriptor, place: str) -> Accessor:
        """Between a type and one field."""
        entry = at.message_type
        if entry is not None and entry.GetOptions().map_entry:
            return self._map(hint, at, entry, place)
        if at.is_repeated:
            return self._repeated(hint, at, place)
        inner, optional = _without_none(hint)
        if optional and self.presence_tells_none and not at.has_presence:
            raise SchemaMismatch(f"{place}: may be None, {at.full_name} has no presence")
        if entry is not None:
            return MessageField(at.name, self.message(inner, entry, place), optional)
        return LeafField(at.name, self.leaf(inner, at, place), optional, at.has_presence)

    def _map(self, hint: Any, at: FieldDescriptor, entry: Any, place: str) -> Accessor:
        parts = get_args(hint)
        if get_origin(hint) not in (Mapping, dict) or len(parts) != 2:
            raise SchemaMismatch(f"{place}: {hint} cannot be a map")
        value = entry.fields_by_name["value"]
        key = self.leaf(parts[0], entry.fields_by_name["key"], f"{place} key")
        if value.message_type is not None:
            return MapField(at.name, key, None, self.message(parts[1], value.message_type, f"{place} value"))
        return MapField(at.name, key, self.leaf(parts[1], value, f"{place} value"), None)

    def _repeated(self, hint: Any, at: FieldDescriptor, place: str) -> Accessor:
        origin, parts = get_origin(hint), get_args(hint)
        build: Callable[[Iterable[Any]], Any]
        if origin in (Mapping, dict):
            return self._entries(parts, at, place)
        if (origin is tuple and len(parts) == 2 and parts[1] is Ellipsis) or origin is Sequence:
            build, ordered = tuple, True
        elif origin is list:
            build, ordered = list, True
        elif origin in (frozenset, AbstractSet):
            build, ordered = frozenset, False
        else:
            raise SchemaMismatch(f"{place}: {hint} cannot be repeated")
        if at.message_type is None:
            return LeafList(at.name, self.leaf(parts[0], at, f"{place}[]"), build, ordered)
        converter = self.message(parts[0], at.message_type, f"{place}[]")
        identify = self.identity(parts[0], at.message_type, f"{place}[]")
        return MessageList(at.name, converter, GetMessageClass(at.message_type), identify, build, ordered)

    def _entries(self, parts: tuple[Any, ...], at: FieldDescriptor, place: str) -> Accessor:
        """A mapping whose order counts."""
        entry = at.message_type
        if entry is None or len(entry.fields) != 2:
            raise SchemaMismatch(f"{place}: a mapping is a map, or a repeated message of two fields: key, then value")
        converter = self.message(types.GenericAlias(tuple, parts), entry, place)
        key = min(entry.fields, key=lambda found: found.number)
        list_field = MessageList(at.name, converter, GetMessageClass(entry), by_fields((key,)), dict, ordered=True)
        return Items(list_field)

    def identity(self, hint: Any, descriptor: Any, place: str) -> Callable[[Any], object]:
        """What tells one element of a repeated field from another."""
        if not _is_struct(hint):
            return known_bytes
        if hint not in self.rules.ids:
            raise SchemaMismatch(f"{place}: say what tells one {hint.__name__} from another (Rules.ids, or ())")
        ids = self.rules.ids[hint]
        return by_paths([self._path(hint, descriptor, name, place) for name in ids]) if ids else known_bytes

    def _path(self, hint: Any, descriptor: Any, name: str, place: str) -> list[FieldDescriptor]:
        """The fields on the way to an id, which may be one of a message within: `spec.replica`."""
        path: list[FieldDescriptor] = []
        for part in name.split("."):
            names = self.rules.names.get(hint, _NOTHING)
            at = descriptor.fields_by_name.get(names.get(part, part)) if descriptor is not None else None
            if at is None:
                full_name = descriptor.full_name if descriptor is not None else path[-1].full_name
                raise SchemaMismatch(f"{place}: {full_name} has no id field {part}")
            path.append(at)
            hint, descriptor = _fields_of(hint).get(part) if _is_struct(hint) else None, at.message_type
        return path


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"))


def _fields_of(value_type: type) -> dict[str, Any]:
    hints = get_type_hints(value_type)
    if dataclasses.is_dataclass(value_type):
        return {found.name: hints[found.name] for found in dataclasses.fields(value_type) if found.init}
    return {name: hints[name] for name in cast("Any", value_type)._fields}


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    parts = get_args(hint)
    left = [part for part in parts if part is not types.NoneType]
    return (left[0], len(parts) > 1) if len(left) == 1 else (hint, False)
