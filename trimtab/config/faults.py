"""Messages for faulty values: one short line with what is expected, and the value itself where it may be shown.

pydantic finds the faults; its own messages name Python's types, which authors of YAML need not know.
"""

from __future__ import annotations

import difflib
import json
import math
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic_core import ErrorDetails

_SHOWN: Final = 40
_NAMED: Final[Mapping[str, str]] = {
    "missing": "required",
    "extra_forbidden": "unknown field",
    "finite_number": "must be a finite number",
    "recursion_loop": "must not hold itself",
}
_WANTED: Final[Mapping[str, str]] = {
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "string_type": "text",
    "float_type": "a number",
    "float_parsing": "a number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "enum": "{expected}",
}
"""By pydantic's name of the fault, after "must be"."""
_LENGTHS: Final[Mapping[str, str]] = {
    "too_short": "must have at least {min_length}, and has {actual_length}",
    "too_long": "must have at most {max_length}, and has {actual_length}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
}


def describe(fault: ErrorDetails) -> str:
    """One line without the place. The value is shown when `fault` has it (`errors(include_input=True)`)."""
    kind, context = fault["type"], fault.get("ctx", {})
    if kind in _NAMED:
        return _NAMED[kind]
    if kind in _LENGTHS:
        return _LENGTHS[kind].format(**context)
    if kind in _WANTED:
        wanted = f"must be {_WANTED[kind].format(**context)}"
        return f"{wanted}, not {shown(fault['input'])}" if "input" in fault else wanted
    return str(context.get("error") or fault["msg"]).removeprefix("Value error, ")


def shown(value: object) -> str:
    """A value as YAML writes it, in one short line; of a list or mapping only what it is."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def check_scalar(value: object, kinds: frozenset[type]) -> object:
    """The value of a field that holds a number or a switch, as it is. Raises ValueError where it only looks like one.

    pydantic would take "2" for 2 and "yes" for true, and misplaced quotes would be stored without an error.
    """
    if value is None or not kinds:
        return value
    if kinds == {bool}:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {shown(value)}")
    elif isinstance(value, str):
        raise ValueError(f"must be a number, not the text {shown(value)}{_number_hint(value)}")
    elif isinstance(value, bool):
        raise ValueError(f"must be a number, not {shown(value)}")
    return value


def _number_hint(text: str) -> str:
    """What to write where a text looks like a number; YAML has no `1_000`, so that is text without any quotes."""
    try:
        if not math.isfinite(float(text)):
            return ""
    except ValueError:
        return ""
    return f": write {text.replace('_', '')}" if "_" in text else ": leave the quotes out"


def scalar_kinds(annotation: Any) -> frozenset[type]:
    """Which of int, float and bool a field holds, alone or in a union; none where that is text or a part."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return scalar_kinds(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return frozenset().union(*(scalar_kinds(part) for part in get_args(annotation)))
    return frozenset({annotation}) if annotation in (int, float, bool) else frozenset()


def suggestion(word: str, known: Iterable[str]) -> str:
    """`, did you mean …?` where one of the known words is near."""
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.75)
    return f", did you mean {near[0]}?" if near else ""
