"""The resources that users write: ServicePolicy and Pool, from YAML or protobuf to one validated domain type.

YAML keys are the camelCase names of protobuf's JSON mapping, so a resource looks the same in a file, in `trimtab get`
and over gRPC, and one set of rules checks all three. What does not parse raises `ResourceError`, one violation per
field. Rules that need more than one resource (a role both scaled and pooled, floors that do not fit) belong to the
policy engine.

This module knows nothing of files, gRPC or the store.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from google.protobuf import json_format
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from trimtab.api.policy.v1 import policy_pb2
from trimtab.config.faults import describe, suggestion
from trimtab.config.fields import Name, Spec
from trimtab.config.specs import PoolSpec, ServicePolicySpec

API_VERSION: Final = "trimtab.dev/v1"


@dataclass(frozen=True, kw_only=True)
class FieldViolation:
    """One thing wrong with one field; `field` is a path such as `spec.roles[0].maxReplicas`."""

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


class Metadata(Spec):
    """A resource's name, and what the server adds."""

    name: Name
    etag: str = Field("", max_length=64)
    revision: Annotated[int, Field(ge=0)] = 0
    create_time: str | None = None
    update_time: str | None = None
    paused: bool = False


class ServicePolicy(Spec):
    """One model with one SLO class; its name is the service's."""

    api_version: Literal["trimtab.dev/v1"] = API_VERSION
    kind: Literal["ServicePolicy"] = "ServicePolicy"
    metadata: Metadata
    spec: ServicePolicySpec

    @property
    def name(self) -> str:
        """The service's name."""
        return self.metadata.name


class Pool(Spec):
    """A pool of GPUs."""

    api_version: Literal["trimtab.dev/v1"] = API_VERSION
    kind: Literal["Pool"] = "Pool"
    metadata: Metadata
    spec: PoolSpec

    @property
    def name(self) -> str:
        """The pool's name."""
        return self.metadata.name


Resource = ServicePolicy | Pool
_R = TypeVar("_R", ServicePolicy, Pool)


def parse_document(document: object) -> Resource:
    """One YAML document → a resource. Raises ResourceError; `Topology` files belong to the simulated fleet."""
    if not isinstance(document, Mapping):
        raise ResourceError([FieldViolation(field="", description="a resource is a mapping with apiVersion and kind")])
    if document.get("apiVersion") != API_VERSION:
        raise ResourceError([FieldViolation(field="apiVersion", description=f"must be {API_VERSION}")])
    kind = document.get("kind")
    if kind == "ServicePolicy":
        return _validate(ServicePolicy, document)
    if kind == "Pool":
        return _validate(Pool, document)
    raise ResourceError([FieldViolation(field="kind", description="must be ServicePolicy or Pool")])


def parse_service_policy(proto: policy_pb2.ServicePolicy) -> ServicePolicy:
    """Protobuf → domain. Raises ResourceError."""
    return _validate(ServicePolicy, _from_proto(proto))


def parse_pool(proto: policy_pb2.Pool) -> Pool:
    """Protobuf → domain. Raises ResourceError."""
    return _validate(Pool, _from_proto(proto))


def service_policy_to_proto(policy: ServicePolicy) -> policy_pb2.ServicePolicy:
    """Domain → protobuf."""
    return json_format.ParseDict(_proto_dict(policy), policy_pb2.ServicePolicy())


def pool_to_proto(pool: Pool) -> policy_pb2.Pool:
    """Domain → protobuf."""
    return json_format.ParseDict(_proto_dict(pool), policy_pb2.Pool())


def to_document(resource: Resource) -> dict[str, Any]:
    """The resource as what a user would write, defaults spelt out; for `trimtab get` and files."""
    return resource.model_dump(mode="json", by_alias=True, exclude_none=True)


def _from_proto(proto: policy_pb2.ServicePolicy | policy_pb2.Pool) -> dict[str, Any]:
    if proto.metadata.HasField("create_time") or proto.metadata.HasField("update_time"):
        # The server's own words, never read back; protobuf's JSON mapping fails on a time that is none.
        proto = copy.deepcopy(proto)
        proto.metadata.ClearField("create_time")
        proto.metadata.ClearField("update_time")
    document: dict[str, Any] = json_format.MessageToDict(proto)
    metadata = document.get("metadata")
    if isinstance(metadata, dict) and "revision" in metadata:
        metadata["revision"] = int(metadata["revision"])  # protobuf's JSON writes 64-bit numbers as strings
    return document


_PROTO_ENUMS = {
    "role": "ROLE_",
    "affinity": "TOPOLOGY_LEVEL_",
    "metric": "PROPORTIONAL_METRIC_",
    "allocation": "ALLOCATION_",
    "prediction": "PREDICTION_",
    "overload": "OVERLOAD_",
}


def _proto_dict(resource: Resource) -> dict[str, Any]:
    document = to_document(resource)
    del document["apiVersion"], document["kind"]
    converted = _name_enums(document)
    assert isinstance(converted, dict)  # noqa: S101 - a mapping stays one; this tells mypy
    return converted


def _name_enums(value: object) -> object:
    if isinstance(value, dict):
        return {
            key: _PROTO_ENUMS[key] + item.upper().replace("-", "_")
            if key in _PROTO_ENUMS and isinstance(item, str)
            else _name_enums(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_name_enums(item) for item in value]
    return value


def _validate(model: type[_R], document: Mapping[str, Any]) -> _R:
    try:
        # By the names of protobuf's JSON mapping alone: Python's own (`lead_s`) are for who makes parts in code.
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
    """The part of a resource that stands at a path of it."""
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
