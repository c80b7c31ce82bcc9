"""What the fields of resources are made of: the frozen base of every part, and the kinds of names and numbers.

`trimtab.config.specs` and `trimtab.config.poolrules` put them together.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    AfterValidator,
    AliasGenerator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic.alias_generators import to_camel

from trimtab.config.faults import check_scalar, scalar_kinds
from trimtab.domain.vocabulary import Role, TopologyLevel
from trimtab.names import is_identifier


def _check_name(value: str) -> str:
    if not is_identifier(value):
        raise ValueError("use 1 to 63 lower-case letters, digits and '-', starting and ending with a letter or digit")
    return value


def enum_word(prefix: str) -> BeforeValidator:
    """Takes protobuf's spelling of an enum (ROLE_PREFILL) beside YAML's (prefill)."""

    def convert(value: object) -> object:
        if isinstance(value, str) and value.startswith(prefix):
            return value.removeprefix(prefix).lower().replace("_", "-")
        return value

    return BeforeValidator(convert)


def _check_printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("has control characters")
    return value


Name = Annotated[str, AfterValidator(_check_name)]
Text = Annotated[str, AfterValidator(_check_printable)]
RoleWord = Annotated[Role, enum_word("ROLE_")]
LevelWord = Annotated[TopologyLevel, enum_word("TOPOLOGY_LEVEL_")]
# Far below any useful value, and far above what would overflow as a divisor.
SMALLEST = 1e-6
Seconds = Annotated[float, Field(ge=SMALLEST, le=86_400)]
Tolerance = Annotated[float, Field(ge=0, lt=1)]


def _check_whole_number(value: object) -> object:
    return check_scalar(value, frozenset({int}))


WholeNumber = Annotated[int, BeforeValidator(_check_whole_number)]
"""An item of a list; fields of their own are checked by `Spec`."""


class Spec(BaseModel):
    """What every part of a resource shares: frozen, closed, finite, camelCase outside, numbers without quotes."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        alias_generator=AliasGenerator(alias=to_camel),
        populate_by_name=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_no_text(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields.get(info.field_name or "")
        return value if field is None else check_scalar(value, scalar_kinds(field.annotation))
