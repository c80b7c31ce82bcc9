"""Kinds of resources: what a kind is called in files, commands, gRPC methods and the store, and its codec.

`trimtab.config.resources` has one `ResourceKind` for each kind; whatever works on resources of any kind goes by those.
A kind called `Pool` has a message `Pool`, a member `RESOURCE_KIND_POOL`, methods `ApplyPool`, `GetPool`, `ListPools`
and `DeletePool` of the PolicyService, and a field `pool` in their requests and answers and in `ResourceRevision`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Generic, Literal, NamedTuple, TypeVar, cast

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from pydantic import Field

from trimtab.api.policy.v1 import policy_pb2
from trimtab.config.fields import Name, Spec
from trimtab.config.validation import validate
from trimtab.store.message_codec import Rules
from trimtab.store.model_codec import ModelCodec

API_VERSION: Final = "trimtab.dev/v1"
_METHODS: Final = policy_pb2.DESCRIPTOR.services_by_name["PolicyService"].methods_by_name
_TIMES: Final = frozenset({"create_time", "update_time"})

R = TypeVar("R", bound="Resource")
M = TypeVar("M", bound=Message)


class Metadata(Spec):
    """A resource's name, and what the server adds."""

    name: Name
    etag: str = Field("", max_length=64)
    revision: Annotated[int, Field(ge=0)] = 0
    create_time: str | None = None
    update_time: str | None = None
    paused: bool = False


class Resource(Spec):
    """What resources of every kind have; each kind adds its `spec`."""

    api_version: Literal["trimtab.dev/v1"] = API_VERSION
    kind: str
    metadata: Metadata

    @property
    def name(self) -> str:
        """The resource's name, one of its kind."""
        return self.metadata.name

    @property
    def summary(self) -> str:
        """What it is about, in one short line. Raises NotImplementedError unless overridden."""
        raise NotImplementedError


class Method(NamedTuple):
    """A method of the PolicyService."""

    name: str
    request: type[Any]
    response: type[Any]


@dataclass(frozen=True, kw_only=True)
class ResourceKind(Generic[R, M]):
    """One kind of resource.

    `plural` is the name of many, as `List…` has it; `aliases` are more names for it in commands; `missing` is the
    error reason for a resource that does not exist.
    """

    model: type[R]
    message: type[M]
    plural: str
    aliases: tuple[str, ...] = ()
    missing: str

    @cached_property
    def name(self) -> str:
        """The kind as resources name it, such as `ServicePolicy`."""
        return self.model.__name__

    @cached_property
    def field(self) -> str:
        """The field that holds one of it in requests, answers and revisions, such as `service_policy`."""
        return _joined(self.name, "_")

    @cached_property
    def plural_field(self) -> str:
        """The field that holds many of it in the answer of `List…`, such as `service_policies`."""
        return _joined(self.plural, "_")

    @cached_property
    def collection(self) -> str:
        """The kind's name in the store, such as `service-policies`."""
        return _joined(self.plural, "-")

    @cached_property
    def words(self) -> tuple[str, ...]:
        """What commands call it; the first one is shown."""
        return (self.name.lower(), self.plural.lower(), *self.aliases)

    @cached_property
    def number(self) -> policy_pb2.ResourceKind.ValueType:
        """The member of protobuf's enum."""
        return policy_pb2.ResourceKind.Value(f"RESOURCE_KIND_{self.field.upper()}")

    @cached_property
    def codec(self) -> ModelCodec[R]:
        """Between model and message. Times are the server's own and never read back."""
        rules = Rules(
            only_value={self.model: frozenset({"api_version", "kind"}), Metadata: _TIMES},
            only_stored={policy_pb2.ResourceMetadata.DESCRIPTOR.full_name: _TIMES},
        )
        return ModelCodec(self.model, self.message, rules, validate=self.validate)

    def validate(self, document: Mapping[str, Any]) -> R:
        """Plain data → domain. Raises ResourceError."""
        return validate(self.model, document)

    def parse(self, message: M) -> R:
        """Protobuf → domain. Raises ResourceError."""
        return self.codec.read(message)

    def to_message(self, resource: R) -> M:
        """Domain → protobuf, every default spelt out."""
        return cast("M", self.codec.write(resource))

    def method(self, verb: Literal["Apply", "Get", "List", "Delete"]) -> Method:
        """The PolicyService's method for it."""
        name = verb + (self.plural if verb == "List" else self.name)
        method = _METHODS[name]
        return Method(name, GetMessageClass(method.input_type), GetMessageClass(method.output_type))

    def many_in(self, message: Message | type[Message]) -> str | None:
        """The field of a message that holds several of this kind; None where there is none."""
        for field in message.DESCRIPTOR.fields:
            if field.is_repeated and field.message_type is self.message.DESCRIPTOR:
                return field.name
        return None


class ResourceSet:
    """Resources of every kind, by name."""

    def __init__(self, resources: Iterable[Resource] = ()) -> None:
        self._by_kind: dict[str, dict[str, Resource]] = {}
        for resource in resources:
            self._by_kind.setdefault(resource.kind, {})[resource.name] = resource

    def of(self, kind: ResourceKind[R, Any]) -> Mapping[str, R]:
        """Those of one kind."""
        return cast("Mapping[str, R]", self._by_kind.get(kind.name, {}))

    def beside(self, others: ResourceSet) -> ResourceSet:
        """These and the others; of two with one kind and name the other."""
        return ResourceSet([*self, *others])

    def __iter__(self) -> Iterator[Resource]:
        return (resource for named in self._by_kind.values() for resource in named.values())


def one_of(names: Sequence[str]) -> str:
    """Names as people are asked to choose: `a or b`, `a, b or c`."""
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _joined(name: str, separator: str) -> str:
    """`ServicePolicy` → `service_policy`."""
    return re.sub("(?<!^)(?=[A-Z])", separator, name).lower()
