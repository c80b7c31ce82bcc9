"""Names of the contract for the engine's values."""

from __future__ import annotations

from trimtab.api.common.v1 import types_pb2
from trimtab.words import Role


def role_name(role: Role) -> str:
    """The protobuf name, such as ROLE_DECODE."""
    return types_pb2.Role.Name(types_pb2.Role.ValueType(role.number))
