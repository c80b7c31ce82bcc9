"""The parts of a compiled codec: how a value gets into a message or one of its fields, and out again.

``trimtab.store.message_codec`` puts them together. ``write`` sets every known field of a message that exists already
and leaves the rest of it alone; it raises ``ValueError``. ``read`` raises ``Unreadable``, which names the field.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from trimtab.store.message_scalars import Leaf, Unreadable


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


ABSENT = object()
"""What is read of a field that the value's own default stands for."""


@dataclass(frozen=True)
class Entry:
    """One entry of a map of messages: a field that has none of its own. Without the entry it has its default."""

    name: str
    key: str
    converter: Converter

    def write(self, value: Any, message: Any) -> None:
        entries = getattr(message, self.name)
        entries[self.key].SetInParent()
        self.converter.write(value, entries[self.key])

    def read(self, message: Any, path: str) -> Any:
        entries = getattr(message, self.name)
        return self.converter.read(entries[self.key], path) if self.key in entries else ABSENT


@dataclass(frozen=True)
class Inside:
    """A field that stands in a message within; where that, or an optional field of it, is absent it has its default."""

    name: str
    field: FieldDescriptor
    accessor: Accessor

    def write(self, value: Any, message: Any) -> None:
        inner = getattr(message, self.name)
        inner.SetInParent()
        self.accessor.write(value, inner)

    def read(self, message: Any, path: str) -> Any:
        inner = getattr(message, self.name)
        known = message.HasField(self.name) and (not self.field.has_presence or inner.HasField(self.field.name))
        return self.accessor.read(inner, path) if known else ABSENT


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
            return self.value_type(**{name: value for name, value in known.items() if value is not ABSENT})
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
