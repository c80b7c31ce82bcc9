"""Scalars of a compiled codec: which types stand for which kinds of fields, and the errors of every codec."""

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from google.protobuf.descriptor import FieldDescriptor

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
