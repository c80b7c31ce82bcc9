"""Parse, don't validate: turns request fields into typed values and collects every violation on the way.

    violations = Violations()
    name = violations.identifier("policy.name", request.policy.name)
    target = violations.finite_number("policy.target_tps", request.policy.target_tps, above=0)
    violations.raise_if_any()

Each helper gives a value back even when it is refused, so that one pass finds all faults; nothing reads such a
value, since ``raise_if_any`` comes before the first use.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from trimtab.names import is_identifier, is_object_name
from trimtab.rpc.errors import InvalidRequest, Violation

_MAX_VIOLATIONS = 100


class EnumType(Protocol):
    """A generated protobuf enum, such as ``types_pb2.Role``."""

    def Name(self, number: Any) -> str: ...


class Violations:
    """Collects violations of one request, at most 100; later ones are counted, not kept."""

    def __init__(self) -> None:
        self._found: list[Violation] = []
        self._prefix = ""
        self._dropped = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def found(self) -> tuple[Violation, ...]:
        """What was collected so far."""
        return tuple(self._found)

    @contextmanager
    def below(self, field: str) -> Iterator[None]:
        """Within the block, fields are named relative to ``field``: ``min`` becomes ``field.min``."""
        outer = self._prefix
        self._prefix = self._path(field) + "."
        try:
            yield
        finally:
            self._prefix = outer

    def add(self, field: str, text: str) -> None:
        """``field`` is wrong; ``text`` is how, and what would be right."""
        if len(self._found) < _MAX_VIOLATIONS:
            self._found.append(Violation(self._path(field), text))
        else:
            self._dropped += 1

    def require(self, field: str, ok: bool, text: str) -> bool:
        """Adds a violation unless ``ok``, and gives ``ok`` back."""
        if not ok:
            self.add(field, text)
        return ok

    def raise_if_any(self) -> None:
        """Raises ``InvalidRequest`` with everything collected."""
        if not self._found:
            return
        dropped = [Violation("…", f"and {self._dropped} more")] if self._dropped else []
        raise InvalidRequest([*self._found, *dropped])

    def finite_number(
        self,
        field: str,
        value: float,
        *,
        minimum: float | None = None,
        maximum: float | None = None,
        above: float | None = None,
    ) -> float:
        """A finite number with ``minimum ≤ value ≤ maximum`` and ``value > above``."""
        if not math.isfinite(value):
            self.add(field, "is not a finite number")
        elif minimum is not None and value < minimum:
            self.add(field, f"is {value:g}, must be at least {minimum:g}")
        elif above is not None and value <= above:
            self.add(field, f"is {value:g}, must be more than {above:g}")
        elif maximum is not None and value > maximum:
            self.add(field, f"is {value:g}, must be at most {maximum:g}")
        return value

    def identifier(self, field: str, value: str) -> str:
        """A DNS-1123 label: lower-case letters, digits and inner hyphens, 1 to 63 characters."""
        if not value:
            self.add(field, "is required")
        elif not is_identifier(value):
            self.add(field, f"{value[:80]!r} is not a name of lower-case letters, digits and hyphens, at most 63")
        return value

    def object_name(self, field: str, value: str) -> str:
        """A replica's, group's or node's name: letters, digits and inner ``.-_``, 1 to 253 characters."""
        if not value:
            self.add(field, "is required")
        elif not is_object_name(value):
            self.add(field, f"{value[:80]!r} is not a name of letters, digits and inner . - _, at most 253")
        return value

    def bounded_string(self, field: str, value: str, *, max_length: int = 256, required: bool = True) -> str:
        """Printable text of at most ``max_length`` characters."""
        if required and not value:
            self.add(field, "is required")
        elif len(value) > max_length:
            self.add(field, f"has {len(value)} characters, may have {max_length}")
        elif not value.isprintable():
            self.add(field, "has control characters")
        return value

    def enum_set(self, field: str, value: int, enum_type: EnumType) -> int:
        """A value of the enum that is known here and not the unspecified zero."""
        if value == 0:
            self.add(field, "is required")
        else:
            try:
                enum_type.Name(value)
            except ValueError:
                self.add(field, f"{value} is not a known value")
        return value

    def _path(self, field: str) -> str:
        return self._prefix + field
