"""A codec between pydantic models and protobuf messages: the one of ``message_codec``, with what models add to it.

    codec = ModelCodec(Pool, policy_pb2.Pool)
    message = codec.write(pool)
    document = codec.document(message)      # what the message has, by alias, as YAML would have it
    pool = codec.read(message)              # the document, validated

A field that the message does not have is left out of the document, so that the model gives its default and validators
see what was given and what was not: zero is absent where the field has no presence. Enums are their words (``A_B`` of
type ``Kind`` is ``a-b`` for ``KIND_A_B``), numbers that are not finite are text, as in protobuf's JSON mapping; a
model's alias is the field's JSON name. Any other difference between model and message is a ``SchemaMismatch`` when the
codec is made.
"""

import functools
import math
import operator
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from trimtab.store.message_codec import Codec, Compiler, Rules
from trimtab.store.message_fields import Accessor, Converter, Struct
from trimtab.store.message_scalars import Leaf, SchemaMismatch, enum_names, leaf_of

V = TypeVar("V")


class ModelCodec(Codec[V]):
    """Between one model and one message. Raises ``SchemaMismatch`` when made.

    ``validate`` turns a document into a value; without it the model does, and raises pydantic's errors.
    """

    def __init__(
        self,
        value_type: type[V],
        message_type: type[Message],
        rules: Rules | None = None,
        *,
        validate: Callable[[Mapping[str, Any]], V] | None = None,
    ) -> None:
        super().__init__(value_type, message_type, rules)
        self._validate = validate or cast("Any", value_type).model_validate

    def _compiler(self, rules: Rules) -> Compiler:
        return _ModelCompiler(rules)

    def document(self, message: Message) -> dict[str, Any]:
        """What the message has, as plain data by alias, parts of parts too; not validated."""
        return cast("dict[str, Any]", self._converter.read(message, ""))

    def read(self, message: Message) -> V:
        """The value. Raises what ``validate`` raises."""
        return self._validate(self.document(message))


class _ModelCompiler(Compiler):
    presence_tells_none = False

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._models: dict[tuple[type, str], _Model] = {}

    def message(self, hint: Any, descriptor: Any, place: str) -> Converter:
        if not _is_model(hint):
            return super().message(hint, descriptor, place)
        known = self._models.get((hint, descriptor.full_name))
        if known is not None:
            return known
        model = self._models[hint, descriptor.full_name] = _Model(Struct(hint))
        parts = hint.model_fields
        hints = {name: _bare(part.annotation) for name, part in parts.items()}
        for name, stored, accessor in self.fields(hint, hints, descriptor, place):
            alias, json_name = parts[name].alias or name, descriptor.fields_by_name[stored].json_name
            if alias != json_name:
                raise SchemaMismatch(f"{place}.{name}: its alias is {alias}, {descriptor.full_name} has {json_name}")
            model.struct.fields.append((name, stored, accessor))
            model.aliases[stored] = (alias, accessor)
        return model

    def leaf(self, hint: Any, at: FieldDescriptor, place: str) -> Leaf:
        if at.enum_type is not None:
            words = {number: name.lower().replace("_", "-") for name, number in enum_names(at).items()}
            # A number of a later release stays one: the model says what may stand there.
            return Leaf(leaf_of(hint, at, place).store, lambda number: words.get(number, number))
        return Leaf(leaf_of(hint, at, place).store, _as_json if hint is float else _itself)

    def identity(self, hint: Any, descriptor: Any, place: str) -> Callable[[Any], object]:
        if _is_model(hint) and hint not in self.rules.ids:
            return lambda message: message.SerializeToString(deterministic=True)
        return super().identity(hint, descriptor, place)


@dataclass
class _Model:
    """A model: written as a struct, read as a document of what is there."""

    struct: Struct
    aliases: dict[str, tuple[str, Accessor]] = field(default_factory=dict)

    def write(self, value: Any, message: Any) -> None:
        self.struct.write(value, message)

    def read(self, message: Any, path: str) -> dict[str, Any]:
        document: dict[str, Any] = {}
        inside = f"{path}." if path else ""
        for at, _ in message.ListFields():
            if at.name in self.aliases:
                alias, accessor = self.aliases[at.name]
                document[alias] = accessor.read(message, inside + at.name)
        return document


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "model_fields")


def _bare(hint: Any) -> Any:
    """A type without the bounds that ``Annotated`` adds, also in its parts."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _bare(parts[0])
    if origin is tuple:
        return types.GenericAlias(tuple, tuple(_bare(part) for part in parts))
    if type(None) in parts:
        return functools.reduce(operator.or_, (_bare(part) for part in parts))
    return hint


def _itself(value: Any) -> Any:
    return value


def _as_json(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
