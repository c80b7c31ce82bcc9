"""The design's terms as closed enums, for cores and for YAML; each maps onto its protobuf enum by name.

`Role.PREFILL.value` is the name in YAML and in output; `Role.PREFILL.number` is the protobuf enum's number.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Any, Self, cast

from trimtab.api.common.v1 import types_pb2


class _Word(StrEnum):
    """A StrEnum whose members are the values of one protobuf enum, without its prefix and its zero value."""

    @classmethod
    def _wrapper(cls) -> Any:
        return _WRAPPERS[cls.__name__]

    @classmethod
    def _prefix(cls) -> str:
        return "".join("_" + letter if letter.isupper() else letter for letter in cls.__name__)[1:].upper() + "_"

    @cached_property
    def number(self) -> int:
        """The protobuf enum's number."""
        return cast("int", self._wrapper().Value(self.proto_name))

    @classmethod
    def from_number(cls, number: int) -> Self:
        """The member of a protobuf number. Raises ValueError for UNSPECIFIED and for numbers of a later release."""
        try:
            name = cls._wrapper().Name(number)
        except ValueError:
            raise ValueError(f"{number} is no {cls.__name__}") from None
        return cls.from_name(name)

    @cached_property
    def proto_name(self) -> str:
        """The protobuf enum's name, such as ROLE_PREFILL."""
        return self._prefix() + self.value.upper().replace("-", "_")

    @classmethod
    def by_number(cls) -> dict[int, Self]:
        """Every member by its protobuf number."""
        return {member.number: member for member in cls}

    @classmethod
    def from_name(cls, name: str) -> Self:
        """The member of a protobuf name such as ROLE_PREFILL. Raises ValueError."""
        word = name.removeprefix(cls._prefix()).lower().replace("_", "-")
        return cls(word)


class Role(_Word):
    """What a replica does for its service."""

    COLOCATED = "colocated"
    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_ATTENTION = "prefill-attention"
    PREFILL_FFN = "prefill-ffn"


MAX_ROLES = 3
"""Roles of one service: disaggregated MoE has two for prefill and one for decode."""


class Quality(_Word):
    """How far a measurement can be trusted."""

    OK = "ok"
    MISSING = "missing"
    STALE = "stale"
    PARTIAL = "partial"
    RESET = "reset"
    WARMING = "warming"


class LifeCycle(_Word):
    """The state of a replica."""

    STARTING = "starting"
    ACTIVE = "active"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    REACTIVATING = "reactivating"
    TERMINATING = "terminating"
    FAILED = "failed"
    UNKNOWN = "unknown"


class HoldOwner(_Word):
    """The owner of a hold, which keeps a replica from being routable."""

    START_UP = "start-up"
    RELEASE = "release"
    SOFT_SCALE_IN = "soft-scale-in"
    GATING = "gating"
    OPERATOR = "operator"


class TopologyLevel(_Word):
    """Levels of the topology tree inside which a group may be bound, from the narrowest."""

    NODE = "node"
    S1 = "s1"
    S2 = "s2"
    CLUSTER = "cluster"


# The stubs type an enum as a class whose metaclass is the wrapper, which mypy does not take for the wrapper itself.
_WRAPPERS: dict[str, Any] = {
    "Role": types_pb2.Role,
    "Quality": types_pb2.Quality,
    "LifeCycle": types_pb2.LifeCycle,
    "HoldOwner": types_pb2.HoldOwner,
    "TopologyLevel": types_pb2.TopologyLevel,
}
