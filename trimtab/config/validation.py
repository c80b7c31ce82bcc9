"""From plain data to a part of a resource, or to what is wrong with it: one violation per field, with its path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trimtab.config.faults import describe, suggestion
from trimtab.config.fields import Spec

S = TypeVar("S", bound=Spec)


@dataclass(frozen=True, kw_only=True)
class FieldViolation:
    """One fault of one field; `field` is a path such as `spec.roles[0].maxReplicas`."""

    field: str
    description: str

    @property
    def proto_field(self) -> str:
        """The path as the proto spells it: `spec.roles[0].max_replicas`."""
        return re.sub("[A-Z]", lambda found: "_" + found[0].lower(), self.field)


class ResourceError(ValueError):
    """A resource does not parse; `violations` has one entry per field."""

    def __init__(self, violations: list[FieldViolation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{item.field}: {item.description}" for item in violations))


def validate(model: type[S], document: Mapping[str, Any]) -> S:
    """Plain data, by the names of protobuf's JSON mapping → a model. Raises ResourceError, one violation per field."""
    try:
        # By the names of protobuf's JSON mapping alone: Python's own (`lead_s`) are for parts made in code.
        return model.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        # pydantic counts only the items that parsed: a list whose one item is wrong would also be "too short".
        raise ResourceError(
            [
                FieldViolation(field=_path(item["loc"]), description=_describe(model, item))
                for item in faults
                if item["type"] != "too_short" or not any(_is_inside(other["loc"], item["loc"]) for other in faults)
            ]
        ) from None


def _is_inside(location: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(location) > len(outer) and location[: len(outer)] == outer


def _path(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part if part.isprintable() else repr(part)}"
    return text.removeprefix(".")


def _describe(model: type[Spec], fault: ErrorDetails) -> str:
    text = describe(fault)
    if fault["type"] != "extra_forbidden":
        return text
    part = _part_at(model, fault["loc"][:-1])
    known = {} if part is None else {name: field.alias or name for name, field in part.model_fields.items()}
    wrong = str(fault["loc"][-1])
    if wrong in known:
        return f"{text}: write {known[wrong]}"
    return text + (suggestion(wrong, known.values()) or f"; there are {', '.join(known.values())}")


def _part_at(model: type[Spec], location: tuple[int | str, ...]) -> type[Spec] | None:
    """The part of a resource at a path."""
    part: type[Spec] | None = model
    for name in location:
        if isinstance(name, str) and part is not None:
            named = (field.annotation for key, field in part.model_fields.items() if name in (key, field.alias))
            part = _spec_in(next(named, None))
    return part


def _spec_in(annotation: object) -> type[Spec] | None:
    """The part that a field holds: itself, or of a tuple or an optional the one in it."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return annotation
    return next((found for part in get_args(annotation) if (found := _spec_in(part)) is not None), None)
