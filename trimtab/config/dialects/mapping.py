"""Reads dialects from the YAML that people write. Pure: the caller has read the text."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError

from trimtab.config.yamlfile import YamlError, parse_yaml_documents
from trimtab.domain.dialects.model import QUANTITIES, Combine, Dialect, Family, Kind, Quantity
from trimtab.domain.signals import Gauge, Latency

MAX_MAPPING_BYTES = 256 * 1024
MAX_NAMES = 16
_RATIOS: frozenset[Quantity] = frozenset({Gauge.AWAKE, *(gauge for gauge in Gauge if gauge.value.endswith("_ratio"))})
# A ratio computed by a server may exceed 1 by a rounding error.
_MOST_RATIO = 1.000001
_MOST_REQUESTS = 1e6
_MOST_START_S = 1e11
_MOST_SECONDS = 1e12
_MOST_COUNTED = 1e15
_COMBINE: Mapping[Quantity, Combine] = {
    Gauge.KV_USAGE_RATIO: Combine.MEAN,
    Gauge.KV_USAGE_MAX_RATIO: Combine.MAXIMUM,
    Gauge.AWAKE: Combine.LEAST,
    Gauge.START_TIME_S: Combine.LEAST,
}

_QUANTITY = {quantity.value: quantity for quantity in QUANTITIES}


def _quantity(value: object) -> Quantity:
    found = _QUANTITY.get(value) if isinstance(value, str) else None
    if found is None:
        raise PydanticCustomError("quantity", "{message}", {"message": f"must be one of {', '.join(_QUANTITY)}"})
    return found


_QuantityName = Annotated[Quantity, PlainValidator(_quantity)]
_SampleName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]*$", max_length=200)]
_LabelName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$", max_length=200)]
_LabelValues = Annotated[list[Annotated[str, Field(max_length=1000)]], Field(min_length=1, max_length=64)]
_DialectName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=63)]


class DialectError(ValueError):
    """A mapping is refused; the message is one line with the file and the field."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _FamilySpec(_Strict):
    names: list[_SampleName] = Field(min_length=1, max_length=MAX_NAMES)
    combine: Annotated[Combine, Field(strict=False)] | None = None
    where: dict[_LabelName, _LabelValues] = Field(default_factory=dict, max_length=8)
    unless: dict[_LabelName, _LabelValues] = Field(default_factory=dict, max_length=8)
    copies: list[_LabelName] | None = Field(default=None, max_length=16)
    scale: float = Field(default=1.0, ge=1e-12, le=1e6)
    largest: float | None = Field(default=None, gt=0, le=1e18)


class _DialectSpec(_Strict):
    name: _DialectName
    extends: _DialectName | None = None
    marks: list[_SampleName] | None = Field(default=None, min_length=1, max_length=MAX_NAMES)
    required: list[_QuantityName] | None = Field(default=None, min_length=1)
    copies: list[_LabelName] = Field(default_factory=list, max_length=16)
    families: dict[_QuantityName, _FamilySpec | None] = Field(default_factory=dict)


def parse_dialects(text: str, *, source: str, known: Sequence[Dialect] = ()) -> tuple[Dialect, ...]:
    """The dialects of a mapping, one a YAML document. ``known`` are those that it may extend.

    A dialect that extends another has its families, each replaced by its own of that quantity, and left out where
    that is null. Raises ``DialectError``, whose message begins with ``source``.
    """
    if len(text) > MAX_MAPPING_BYTES:
        raise DialectError(f"{source}: larger than {MAX_MAPPING_BYTES} bytes")
    try:
        documents = parse_yaml_documents(text, source=source)
    except YamlError as error:
        raise DialectError(str(error)) from error
    if not documents:
        raise DialectError(f"{source}: no dialect in it")
    found: dict[str, Dialect] = {}
    for document in documents:
        spec = _parse(document, source)
        if spec.name in found:
            raise DialectError(f"{source}: name: {spec.name} is there twice")
        found[spec.name] = _dialect(spec, source, {**{dialect.name: dialect for dialect in known}, **found})
    return tuple(found.values())


def _parse(document: object, source: str) -> _DialectSpec:
    try:
        return _DialectSpec.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        # A misspelt key leaves its right name missing: the key is what is wrong.
        first = next((item for item in found if item["type"] == "extra_forbidden"), found[0])
        path = ".".join(str(part) for part in first["loc"] if part != "[key]") or "document"
        message = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
        raise DialectError(f"{source}: {path}: {' '.join(message.split())}") from error


def _dialect(spec: _DialectSpec, source: str, known: Mapping[str, Dialect]) -> Dialect:
    base = None if spec.extends is None else known.get(spec.extends)
    if spec.extends is not None and base is None:
        raise DialectError(f"{source}: extends: there is no dialect {spec.extends}; known: {', '.join(sorted(known))}")
    families = {} if base is None else {family.quantity: family for family in base.families}
    for quantity, family in spec.families.items():
        families.pop(quantity, None)
        if family is not None:
            families[quantity] = _family(quantity, family, tuple(spec.copies), source)
    required = frozenset(spec.required or (base.required if base is not None else ()))
    marks = tuple(spec.marks or (base.marks if base is not None else ()))
    if not marks:
        raise DialectError(f"{source}: marks: missing; name a family that only this engine has")
    if not required or not required <= families.keys():
        raise DialectError(f"{source}: required: must name quantities that the dialect has families for")
    # The order of the quantities, whatever the file's is.
    ordered = tuple(families[quantity] for quantity in QUANTITIES if quantity in families)
    return Dialect(name=spec.name, marks=marks, required=required, families=ordered)


def _family(quantity: Quantity, spec: _FamilySpec, copies: tuple[str, ...], source: str) -> Family:
    if spec.combine is not None and isinstance(quantity, Latency) and spec.combine is not Combine.ADD:
        raise DialectError(f"{source}: families.{quantity.value}.combine: histograms only add")
    largest = _largest(quantity) / spec.scale if spec.largest is None else spec.largest
    if quantity in _RATIOS and largest * spec.scale > _MOST_RATIO:
        place = f"families.{quantity.value}.largest"
        raise DialectError(f"{source}: {place}: {largest:g} × scale is above 1, and the quantity is a ratio")
    if not math.isfinite(largest * spec.scale):
        raise DialectError(f"{source}: families.{quantity.value}.largest: too large")
    return Family(
        quantity=quantity,
        kind=_kind(quantity),
        names=tuple(dict.fromkeys(spec.names)),
        combine=spec.combine or _COMBINE.get(quantity, Combine.ADD),
        where={label: tuple(values) for label, values in spec.where.items()},
        unless={label: tuple(values) for label, values in spec.unless.items()},
        copies=copies if spec.copies is None else tuple(spec.copies),
        scale=spec.scale,
        largest=largest,
    )


def _kind(quantity: Quantity) -> Kind:
    if isinstance(quantity, Latency):
        return Kind.HISTOGRAM
    return Kind.GAUGE if isinstance(quantity, Gauge) else Kind.COUNTER


def _largest(quantity: Quantity) -> float:
    """In our unit."""
    if quantity in _RATIOS:
        return _MOST_RATIO
    if quantity is Gauge.START_TIME_S:
        return _MOST_START_S
    if isinstance(quantity, Gauge):
        return _MOST_REQUESTS
    return _MOST_SECONDS if isinstance(quantity, Latency) else _MOST_COUNTED
