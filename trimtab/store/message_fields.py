"""The parts of a compiled codec: how a value gets into a message or one of its fields, and out again.

``trimtab.store.message_codec`` puts them together. ``write`` sets every known field of a message that exists already
and leaves the rest of it alone; it raises ``ValueError``. ``read`` raises ``Unreadable``, which names the field.
"""

import enum
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, get_origin

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTEGERS = frozenset(
    {
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    }
)


class SchemaMismatch(TypeError):
    """A value type and a message do not correspond; names the field. Raised when a codec is made, never later."""


class Unreadable(ValueError):
    """A message whose content is no value: names the field and says why."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}" if path else why)


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a type that has a codec of its own is stored as a message; ``write`` sets every known field of its target."""

    message: type[Message]
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


class Converter(Protocol):
    """Between a value and a message that exists already: ``write`` sets every known field."""

    def write(self, value: Any, message: Any) -> None: ...

    def read(self, message: Any, path: str) -> Any: ...


class Accessor(Protocol):
    """Between a value and one field of a message."""

    def write(self, value: Any, message: Any) -> None: ...

    def read(self, message: Any, path: str) -> Any: ...


@dataclass(frozen=True)
class Leaf:
    """A scalar. ``store`` raises ``ValueError``, ``parse`` too."""

    store: Callable[[Any], Any]
    parse: Callable[[Any], Any]

    def parsed(self, raw: Any, path: str) -> Any:
        try:
            return self.parse(raw)
        except ValueError as error:
            raise Unreadable(path, str(error)) from error


@dataclass(frozen=True)
class LeafField:
    name: str
    leaf: Leaf
    optional: bool
    presence: bool

    def write(self, value: Any, message: Any) -> None:
        if value is None and self.optional:
            message.ClearField(self.name)
        else:
            setattr(message, self.name, self.leaf.store(value))

    def read(self, message: Any, path: str) -> Any:
        if self.presence and not message.HasField(self.name):
            if self.optional:
                return None
            raise Unreadable(path, "is missing")
        return self.leaf.parsed(getattr(message, self.name), path)


@dataclass(frozen=True)
class MessageField:
    name: str
    converter: Converter
    optional: bool

    def write(self, value: Any, message: Any) -> None:
        if value is None and self.optional:
            message.ClearField(self.name)
            return
        target = getattr(message, self.name)
        target.SetInParent()
        self.converter.write(value, target)

    def read(self, message: Any, path: str) -> Any:
        if message.HasField(self.name):
            return self.converter.read(getattr(message, self.name), path)
        if self.optional:
            return None
        raise Unreadable(path, "is missing")


@dataclass(frozen=True)
class LeafList:
    name: str
    leaf: Leaf
    build: Callable[[Iterable[Any]], Any]
    ordered: bool

    def write(self, value: Any, message: Any) -> None:
        stored = [self.leaf.store(item) for item in value]
        message.ClearField(self.name)
        getattr(message, self.name).extend(stored if self.ordered else sorted(stored))

    def read(self, message: Any, path: str) -> Any:
        found = getattr(message, self.name)
        return self.build([self.leaf.parsed(item, f"{path}[{index}]") for index, item in enumerate(found)])


@dataclass(frozen=True)
class MessageList:
    name: str
    converter: Converter
    message_type: type[Message]
    identify: Callable[[Any], object]
    build: Callable[[Iterable[Any]], Any]
    ordered: bool

    def write(self, value: Any, message: Any) -> None:
        before: dict[object, list[Message]] = defaultdict(list)
        for element in reversed(getattr(message, self.name)):
            before[self.identify(element)].append(element)
        written = []
        for index, item in enumerate(value):
            element = self.message_type()
            self._write_at(index, item, element)
            matching = before[self.identify(element)]
            if matching:
                element.CopyFrom(matching.pop())
                self._write_at(index, item, element)
            written.append(element)
        if not self.ordered:
            written.sort(key=known_bytes)
        message.ClearField(self.name)
        getattr(message, self.name).extend(written)

    def _write_at(self, index: int, item: Any, element: Message) -> None:
        try:
            self.converter.write(item, element)
        except (TypeError, ValueError) as error:
            raise ValueError(f"[{index}].{error}") from error

    def read(self, message: Any, path: str) -> Any:
        found = getattr(message, self.name)
        return self.build([self.converter.read(item, f"{path}[{index}]") for index, item in enumerate(found)])


@dataclass(frozen=True)
class MapField:
    """A map field; entries are matched by key."""

    name: str
    key: Leaf
    leaf: Leaf | None
    converter: Converter | None

    def write(self, value: Mapping[Any, Any], message: Any) -> None:
        stored = {self.key.store(key): item for key, item in value.items()}
        entries = getattr(message, self.name)
        for key in [key for key in entries if key not in stored]:
            del entries[key]
        for key in sorted(stored):
            if self.converter is not None:
                entries[key].SetInParent()
                self.converter.write(stored[key], entries[key])
            elif self.leaf is not None:
                entries[key] = self.leaf.store(stored[key])

    def read(self, message: Any, path: str) -> dict[Any, Any]:
        found = {}
        entries = getattr(message, self.name)
        for key in sorted(entries):
            place = f"{path}[{key!r}]"
            item = entries[key]
            value = self.converter.read(item, place) if self.converter is not None else None
            found[self.key.parsed(key, place)] = self.leaf.parsed(item, place) if self.leaf is not None else value
        return found


@dataclass
class Struct:
    """A dataclass or NamedTuple: the fields of a message by name."""

    value_type: Callable[..., Any]
    fields: list[tuple[str, str, Accessor]] = field(default_factory=list)

    def write(self, value: Any, message: Any) -> None:
        for name, stored, accessor in self.fields:
            try:
                accessor.write(getattr(value, name), message)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{stored}: {error}") from error

    def read(self, message: Any, path: str) -> Any:
        inside = f"{path}." if path else ""
        known = {name: accessor.read(message, inside + stored) for name, stored, accessor in self.fields}
        try:
            return self.value_type(**known)
        except (TypeError, ValueError) as error:
            raise Unreadable(path, str(error)) from error


@dataclass(frozen=True)
class Positions:
    """A tuple of fixed length: the fields of a message in the order of their numbers."""

    accessors: tuple[tuple[str, Accessor], ...]

    def write(self, value: Any, message: Any) -> None:
        for item, (_, accessor) in zip(value, self.accessors, strict=True):
            accessor.write(item, message)

    def read(self, message: Any, path: str) -> Any:
        return tuple(accessor.read(message, f"{path}.{name}") for name, accessor in self.accessors)


@dataclass(frozen=True)
class Wrapped:
    """Anything, in the only field of a message."""

    accessor: Accessor

    def write(self, value: Any, message: Any) -> None:
        self.accessor.write(value, message)

    def read(self, message: Any, path: str) -> Any:
        return self.accessor.read(message, path)


@dataclass(frozen=True)
class Formed:
    """A type with a codec of its own."""

    form: Form

    def write(self, value: Any, message: Any) -> None:
        self.form.write(value, message)

    def read(self, message: Any, path: str) -> Any:
        try:
            return self.form.read(message)
        except (TypeError, ValueError) as error:
            raise Unreadable(path, str(error)) from error


def known_bytes(message: Message) -> bytes:
    """All that this release knows of a message, comparable."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return known.SerializeToString(deterministic=True)


@dataclass(frozen=True)
class Items:
    """A mapping as a repeated message of key and value."""

    entries: MessageList

    def write(self, value: Mapping[Any, Any], message: Any) -> None:
        self.entries.write(value.items(), message)

    def read(self, message: Any, path: str) -> Any:
        return self.entries.read(message, path)


def by_fields(fields: Sequence[FieldDescriptor]) -> Callable[[Any], object]:
    """What tells one message from another, comparable."""
    return by_paths([(found,) for found in fields])


def by_paths(paths: Sequence[Sequence[FieldDescriptor]]) -> Callable[[Any], object]:
    """The same by fields of messages within, each given by the fields on the way to it."""
    getters = [
        (
            operator.attrgetter(".".join(found.name for found in path)),
            path[-1].message_type is not None or path[-1].is_repeated,
        )
        for path in paths
    ]

    def identify(message: Any) -> object:
        return tuple(str(get(message)) if nested else get(message) for get, nested in getters)

    return identify


# Scalars


def leaf_of(hint: Any, at: FieldDescriptor, place: str) -> Leaf:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        if at.enum_type is None:
            return _choice(hint, list(hint), at, place)
        return _enum({member.name: member for member in hint}, hint.__name__, at, place)
    if get_origin(hint) is Literal:
        words = get_args(hint)
        if at.enum_type is None:
            return _choice(None, list(words), at, place)
        return _enum({str(word).upper().replace("-", "_"): word for word in words}, str(hint), at, place)
    if at.enum_type is None and isinstance(hint, type):
        kind = at.cpp_type
        if hint is float and kind == FieldDescriptor.CPPTYPE_DOUBLE:
            return Leaf(_finite, _finite)
        plain = (
            (hint is bool and kind == FieldDescriptor.CPPTYPE_BOOL)
            or (hint is int and kind in _INTEGERS)
            or (hint is str and at.type == FieldDescriptor.TYPE_STRING)
            or (hint is bytes and at.type == FieldDescriptor.TYPE_BYTES)
        )
        if plain:
            return Leaf(_itself, _itself)
    raise SchemaMismatch(f"{place}: {hint} cannot be {at.full_name}")


def _itself(value: Any) -> Any:
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no finite number")
    return value


def _enum(members: Mapping[str, Any], kind: str, at: FieldDescriptor, place: str) -> Leaf:
    """One of ``members``, by name; zero, which says that nothing was written, is no member."""
    stored: Any = at.enum_type
    numbers = {name: number for name, number in enum_names(at).items() if number != 0}
    differing = set(members) ^ set(numbers)
    if differing:
        raise SchemaMismatch(f"{place}: {kind} and {stored.full_name} differ in {', '.join(sorted(differing))}")
    by_member = {member: numbers[name] for name, member in members.items()}
    by_number = {numbers[name]: member for name, member in members.items()}

    def parse(number: int) -> Any:
        if number not in by_number:
            raise ValueError(f"{number} is no {kind} of this release")
        return by_number[number]

    def store(member: Any) -> int:
        if member not in by_member:
            raise ValueError(f"{member!r} is no {kind}")
        return by_member[member]

    return Leaf(store, parse)


def enum_names(at: FieldDescriptor) -> dict[str, int]:
    """The members of a field's enum by their names without its prefix."""
    stored: Any = at.enum_type
    prefix = stored.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {name.removeprefix(prefix): value.number for name, value in stored.values_by_name.items()}


def _choice(kind: type[enum.Enum] | None, members: list[Any], at: FieldDescriptor, place: str) -> Leaf:
    """One of several scalars."""
    raw = {member.value if isinstance(member, enum.Enum) else member: member for member in members}
    kinds = {type(value) for value in raw}
    if len(kinds) != 1:
        raise SchemaMismatch(f"{place}: values of several types cannot be {at.full_name}")
    plain = leaf_of(kinds.pop(), at, place)
    name = kind.__name__ if kind is not None else f"one of {', '.join(map(repr, raw))}"

    def parse(value: Any) -> Any:
        if value not in raw:
            raise ValueError(f"{value!r} is no {name}")
        return raw[value]

    def store(member: Any) -> Any:
        return plain.store(member.value if isinstance(member, enum.Enum) else member)

    return Leaf(store, parse)
