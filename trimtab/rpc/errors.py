"""Domain errors and how they travel: ``google.rpc.Status`` with one ``ErrorInfo`` of domain ``trimtab.dev``.

A handler raises one of the classes below; the server's interceptor turns it into a status. A caller catches
``grpc.RpcError`` and reads ``error_reason`` to branch, ``describe`` to show.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import grpc
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "trimtab.dev"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
# A status travels in trailing metadata, for which gRPC lets 8 KiB pass: texts are cut so that the error arrives.
_MAX_MESSAGE_BYTES = 800
_MAX_METADATA_VALUE_BYTES = 200
_MAX_VIOLATIONS_BYTES = 2400
_MAX_FIELD_BYTES = 200
_MAX_DESCRIPTION_BYTES = 400


@dataclass(frozen=True)
class Violation:
    """One field that does not parse; ``field`` is its path in the request, such as ``policy.bounds[0].min``."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}" if self.field else self.description


class RpcError(Exception):
    """An error with a meaning to the caller. Raise a subclass.

    ``reason`` is UPPER_SNAKE and stable: callers branch on it. ``message`` is one line with what is wrong and what
    to do. ``metadata`` holds details for programs, such as ``{"highest_token": "7"}``.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(self, reason: str, message: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})

    def to_status(self) -> status_pb2.Status:
        """The status as it goes over the wire."""
        code: tuple[int, str] = self.code.value
        status = status_pb2.Status(code=code[0], message=_clip(self.message, _MAX_MESSAGE_BYTES))
        metadata = {key: _clip(value, _MAX_METADATA_VALUE_BYTES) for key, value in self.metadata.items()}
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=metadata))
        return status


class InvalidRequest(RpcError):
    """INVALID_ARGUMENT: the request does not parse; one violation per field, the last counts those left out."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, violations: Sequence[Violation], reason: str = "INVALID_REQUEST") -> None:
        self.violations = tuple(violations)
        super().__init__(reason, "; ".join(map(str, self.violations)))

    def to_status(self) -> status_pb2.Status:
        status = super().to_status()
        bad_request = error_details_pb2.BadRequest()
        left = _MAX_VIOLATIONS_BYTES
        for position, item in enumerate(self.violations):
            field = _clip(item.field, _MAX_FIELD_BYTES)
            description = _clip(item.description, _MAX_DESCRIPTION_BYTES)
            left -= len(field.encode()) + len(description.encode())
            if left < 0:
                bad_request.field_violations.add(field="…", description=f"and {len(self.violations) - position} more")
                break
            bad_request.field_violations.add(field=field, description=description)
        status.details.add().Pack(bad_request)
        return status


class NotFound(RpcError):
    """NOT_FOUND: what the request names does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(RpcError):
    """ALREADY_EXISTS: something else has this name."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(RpcError):
    """FAILED_PRECONDITION: refused in this state (fenced off, expired, outdated); sending it again will not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(RpcError):
    """ABORTED: a concurrent change won (etag); read again, then try again."""

    code = grpc.StatusCode.ABORTED


class Unavailable(RpcError):
    """UNAVAILABLE: cannot be served right now; the same request may succeed later."""

    code = grpc.StatusCode.UNAVAILABLE


class ResourceExhausted(RpcError):
    """RESOURCE_EXHAUSTED: a bound was reached, such as a watch whose reader is too slow."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceeded(RpcError):
    """DEADLINE_EXCEEDED: the server's own bound for a call that came without a deadline."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Internal(RpcError):
    """INTERNAL: a defect of the server. The message shows the caller only where to look."""

    code = grpc.StatusCode.INTERNAL


def _clip(text: str, limit_bytes: int) -> str:
    """At most ``limit_bytes`` of UTF-8; "…" replaces the rest. Text that is no Unicode is replaced."""
    raw = text.encode(errors="replace")
    if len(raw) <= limit_bytes:
        return raw.decode()
    return raw[: limit_bytes - 3].decode(errors="ignore") + "…"


def status_of(error: grpc.RpcError) -> status_pb2.Status | None:
    """The ``google.rpc.Status`` that came with ``error``; None when there is none or it does not parse."""
    if not isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return None
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except ValueError:
                return None
    return None


def error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    """The ``ErrorInfo`` of Trimtab's domain that came with ``error``."""
    status = status_of(error)
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


def error_reason(error: grpc.RpcError) -> str:
    """The stable reason, such as ``FENCED_OFF``; empty when the error is not one of Trimtab's."""
    info = error_info(error)
    return info.reason if info is not None else ""


def field_violations(error: grpc.RpcError) -> list[Violation]:
    """The fields that the server refused, in its order."""
    status = status_of(error)
    found: list[Violation] = []
    for detail in status.details if status is not None else ():
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            found += [Violation(item.field, item.description) for item in bad_request.field_violations]
    return found


def describe(error: grpc.RpcError) -> str:
    """One line for people: code, message and, for a refused request, each field."""
    if not isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return str(error) or type(error).__name__
    code = error.code()
    name = code.name.lower().replace("_", " ") if code is not None else "unknown"
    violations = field_violations(error)
    if violations:
        return f"{name}: " + "; ".join(map(str, violations))
    details = " ".join((error.details() or "no details").split())
    reason = error_reason(error)
    return f"{name}: {details}" + (f" [{reason}]" if reason else "")
