"""The resources that users write, and the registry of their kinds: from YAML or protobuf to one validated domain type.

YAML keys are the camelCase names of protobuf's JSON mapping, so a resource looks the same in a file, in `trimtab get`
and over gRPC, and one set of rules checks all three. What does not parse raises `ResourceError`, one violation per
field. Rules that need more than one resource (a role both scaled and pooled, floors that do not fit) belong to the
policy engine.

This module knows nothing of files, gRPC or the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from trimtab.api.policy.v1 import policy_pb2
from trimtab.config.kinds import API_VERSION, Metadata, Resource, ResourceKind, one_of
from trimtab.config.specs import PoolSpec, ServicePolicySpec
from trimtab.config.validation import FieldViolation, ResourceError

__all__ = [
    "API_VERSION",
    "KINDS",
    "POOL",
    "SERVICE_POLICY",
    "FieldViolation",
    "Metadata",
    "Pool",
    "Resource",
    "ResourceError",
    "ServicePolicy",
    "apply_order",
    "kind_of",
    "parse_document",
    "parse_pool",
    "parse_service_policy",
    "pool_to_proto",
    "service_policy_to_proto",
    "to_document",
]


class ServicePolicy(Resource):
    """One model with one SLO class; its name is the service's."""

    kind: Literal["ServicePolicy"] = "ServicePolicy"
    spec: ServicePolicySpec

    @property
    def summary(self) -> str:
        """Its model, and the bounds of its roles."""
        roles = ", ".join(f"{spec.role} {spec.min_replicas}–{spec.max_replicas}" for spec in self.spec.roles)
        return f"{self.spec.model}: {roles}"


class Pool(Resource):
    """A pool of GPUs."""

    kind: Literal["Pool"] = "Pool"
    spec: PoolSpec

    @property
    def summary(self) -> str:
        """Its size, place and members."""
        members = ", ".join(member.service for member in self.spec.members)
        return f"{self.spec.budget_gpus} GPUs of {self.spec.cluster}: {members}"


SERVICE_POLICY: Final = ResourceKind(
    model=ServicePolicy,
    message=policy_pb2.ServicePolicy,
    plural="ServicePolicies",
    aliases=("service", "services"),
    missing="NO_SUCH_POLICY",
)
POOL: Final = ResourceKind(model=Pool, message=policy_pb2.Pool, plural="Pools", missing="NO_SUCH_POOL")

KINDS: Final[tuple[ResourceKind[Any, Any], ...]] = (SERVICE_POLICY, POOL)
"""Every kind, in the order in which resources are applied: what others refer to comes first."""

parse_service_policy = SERVICE_POLICY.parse
service_policy_to_proto = SERVICE_POLICY.to_message
parse_pool = POOL.parse
pool_to_proto = POOL.to_message


def kind_of(resource: Resource) -> ResourceKind[Any, Any]:
    """The kind of a resource."""
    return next(kind for kind in KINDS if kind.name == resource.kind)


def apply_order(resource: Resource) -> int:
    """The place of its kind in `KINDS`, to sort by."""
    return KINDS.index(kind_of(resource))


def parse_document(document: object) -> Resource:
    """One YAML document → a resource. Raises ResourceError; `Topology` files belong to the simulated fleet."""
    if not isinstance(document, Mapping):
        raise ResourceError([FieldViolation(field="", description="a resource is a mapping with apiVersion and kind")])
    if document.get("apiVersion") != API_VERSION:
        raise ResourceError([FieldViolation(field="apiVersion", description=f"must be {API_VERSION}")])
    name = document.get("kind")
    kind = next((kind for kind in KINDS if kind.name == name), None)
    if kind is None:
        known = one_of([kind.name for kind in KINDS])
        raise ResourceError([FieldViolation(field="kind", description=f"must be {known}")])
    resource: Resource = kind.validate(document)
    return resource


def to_document(resource: Resource) -> dict[str, Any]:
    """The resource as what a user would write, defaults spelt out; for `trimtab get` and files."""
    return resource.model_dump(mode="json", by_alias=True, exclude_none=True)
