"""Changes of resources: parsed, checked against the others, written with etag and fencing token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.message import Message

from policy_engine.core.crossrules import check, user_of
from policy_engine.shell.catalog import Snapshot, dressed, metadata_of, pause_field
from policy_engine.shell.engine import Engine
from trimtab.config.kinds import M, R, ResourceKind, ResourceSet
from trimtab.config.resources import KINDS, FieldViolation, ResourceError
from trimtab.domain.time import timestamp_of
from trimtab.rpc.errors import Aborted, FailedPrecondition, InvalidRequest, NotFound, Unavailable, Violation
from trimtab.store import keys
from trimtab.store.errors import EtagMismatch, FencedOff
from trimtab.store.lease import fenced_write
from trimtab.tasks import to_its_end

LEADER_WAIT_S = 2.0
_LEADER_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A resource to write, and what it replaces."""

    kind: ResourceKind[Any, Any]
    wanted: Any
    current: Any | None
    given_etag: str
    paused: bool
    leave_alone: bool
    validate_only: bool


def assumed_in(request: Message) -> ResourceSet:
    """What a dry run takes for stored: the resources that would be applied before the one it judges.

    Raises InvalidRequest, also for a request that is no dry run and has any.
    """
    given = [
        (kind, f"{name}[{position}]", message)
        for kind in KINDS
        if (name := kind.many_in(request)) is not None
        for position, message in enumerate(getattr(request, name))
    ]
    if given and not cast("Any", request).validate_only:
        raise InvalidRequest([Violation("validate_only", "is required with assumed resources: they are not stored")])
    return ResourceSet(_parsed(kind, message, field) for kind, field, message in given)


def _parsed(kind: ResourceKind[R, Any], message: Any, field: str) -> R:
    try:
        return kind.parse(message)
    except ResourceError as error:
        raise _invalid(field, error.violations) from error


class Applier:
    """The leader's changes of the catalog. Every change happens between two cycles of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def apply(
        self,
        kind: ResourceKind[Any, M],
        given: M,
        *,
        validate_only: bool = False,
        only_if_absent: bool = False,
        assumed: ResourceSet | None = None,
    ) -> tuple[M, bool]:
        """The resource as stored afterwards, and whether it changed.

        Raises an ``RpcError`` for a resource that is refused.
        """
        parsed = _parsed(kind, given, kind.field)
        token = await self._token()
        async with self._engine.lock:
            snapshot = await self._engine.catalog.refresh()
            stored = snapshot.resources if assumed is None else snapshot.resources.beside(assumed)
            faults = check(parsed, stored, self._engine.settings.actuators)
            if faults:
                raise _invalid(kind.field, faults)
            change = _Change(
                kind=kind,
                # Through the domain type and back: what is stored has every default spelt out.
                wanted=_bare(kind.to_message(parsed)),
                current=snapshot.messages_of(kind).get(parsed.name),
                given_etag=metadata_of(given).etag,
                paused=pause_field(kind, parsed.name) in snapshot.pause_reasons,
                leave_alone=only_if_absent,
                validate_only=validate_only,
            )
            return await self._put(change, token)

    async def _put(self, change: _Change, token: int) -> tuple[Any, bool]:
        """Write a checked resource. The same content again is no change, whatever the etag: that makes a retry safe."""
        wanted, current = change.wanted, change.current
        if current is not None and (change.leave_alone or _same(current, wanted)):
            return current, False
        name = wanted.metadata.name
        current_etag = current.metadata.etag if current is not None else ""
        _check_etag(name, change.given_etag, current_etag)
        if change.validate_only:
            return wanted, True
        if current is not None and current.metadata.HasField("create_time"):
            wanted.metadata.create_time.CopyFrom(current.metadata.create_time)
        else:
            wanted.metadata.create_time.CopyFrom(timestamp_of(self._engine.clock.now_s()))
        try:
            documents = self._engine.catalog.documents(change.kind)
            document = await documents.put(name, wanted, expected_etag=current_etag, token=token)
        except (EtagMismatch, FencedOff) as error:
            raise _lost_race(error) from error
        return dressed(document, paused=change.paused), True

    async def delete(self, kind: ResourceKind[Any, Any], name: str, etag: str) -> None:
        """Ends what the engine does about it; no replica is put to sleep or removed.

        Raises FailedPrecondition while another resource needs it.
        """
        await to_its_end(self._delete(kind, name, etag))

    async def _delete(self, kind: ResourceKind[Any, Any], name: str, etag: str) -> None:
        token = await self._token()
        async with self._engine.lock:
            snapshot = await self._engine.catalog.refresh()
            current = metadata_of(known(snapshot, kind, name))
            user = user_of(kind, name, snapshot.resources)
            if user:
                raise FailedPrecondition("IN_USE", f"{name} {user}")
            _check_etag(name, etag, current.etag)
            try:
                await self._engine.catalog.documents(kind).delete(name, expected_etag=current.etag, token=token)
            except (EtagMismatch, FencedOff) as error:
                raise _lost_race(error) from error
            await self._drop_pause(kind, name, token)

    async def pause(self, kind: ResourceKind[Any, Any], name: str, reason: str) -> None:
        """The subject keeps its desired state until it is resumed.

        Raises ``Unavailable`` when another leader took over.
        """
        token = await self._token()
        async with self._engine.lock:
            _require_readable(await self._engine.catalog.refresh(), kind, name)
            command = ("HSET", keys.paused(), pause_field(kind, name), reason or "paused")
            try:
                await fenced_write(self._engine.store, keys.POLICY_ENGINE, token, [command])
            except FencedOff as error:
                raise _lost_race(error) from error

    async def resume(self, kind: ResourceKind[Any, Any], name: str) -> None:
        """Ends a pause; harmless when there is none."""
        token = await self._token()
        async with self._engine.lock:
            _require_readable(await self._engine.catalog.refresh(), kind, name)
            await self._drop_pause(kind, name, token)

    async def _drop_pause(self, kind: ResourceKind[Any, Any], name: str, token: int) -> None:
        command = ("HDEL", keys.paused(), pause_field(kind, name))
        try:
            await fenced_write(self._engine.store, keys.POLICY_ENGINE, token, [command])
        except FencedOff as error:
            raise _lost_race(error) from error

    async def _token(self) -> int:
        """The fencing token. Waits briefly for a lease without a holder, as just after a start."""
        give_up = time.monotonic() + LEADER_WAIT_S
        while True:
            token = self._engine.lease.token
            if token is not None:
                return token
            taken = await self._engine.store.redis.exists(keys.lease(keys.POLICY_ENGINE))
            if taken or time.monotonic() > give_up or self._engine.context.stopping.is_set():
                raise Unavailable("NOT_LEADER", "this engine does not lead; ask the leader, or try again")
            await asyncio.sleep(_LEADER_POLL_S)


def _bare(message: M) -> M:
    """A resource without what the server adds, as it is stored and compared; changed in place."""
    metadata = metadata_of(message)
    name = metadata.name
    metadata.Clear()
    metadata.name = name
    return message


def _same(one: Any, other: Any) -> bool:
    """Whether a user wrote the same."""
    spec, wanted = one.spec, other.spec
    return bool(spec.SerializeToString(deterministic=True) == wanted.SerializeToString(deterministic=True))


def _check_etag(name: str, given: str, current: str) -> None:
    if given and given != current:
        detail = f"its etag is {current}" if current else "it does not exist"
        raise Aborted("ETAG_MISMATCH", f"{name} was changed meanwhile: {detail}, not {given}", {"etag": current})


def known(snapshot: Snapshot, kind: ResourceKind[Any, M], name: str) -> M:
    """The protobuf form of a stored resource. Raises NotFound."""
    found = snapshot.messages_of(kind).get(name)
    if found is None:
        raise NotFound(kind.missing, f"no {kind.name} {name!r}")
    return found


def _require_readable(snapshot: Snapshot, kind: ResourceKind[Any, Any], name: str) -> None:
    if name not in snapshot.resources.of(kind):
        raise NotFound("NO_SUCH_RESOURCE", f"no {kind.name} {name!r}")


def _invalid(prefix: str, faults: tuple[FieldViolation, ...] | list[FieldViolation]) -> InvalidRequest:
    return InvalidRequest(
        [Violation(f"{prefix}.{fault.proto_field}" if fault.field else prefix, fault.description) for fault in faults]
    )


def _lost_race(error: EtagMismatch | FencedOff) -> Aborted | Unavailable:
    if isinstance(error, EtagMismatch):
        return Aborted("ETAG_MISMATCH", str(error), {"etag": error.current_etag})
    return Unavailable("NOT_LEADER", "this engine has just lost the lease; try again")
