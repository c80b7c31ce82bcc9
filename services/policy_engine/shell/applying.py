"""Changes of resources: parsed, checked against the others, written with etag and fencing token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from policy_engine.core.crossrules import check_policy, check_pool
from policy_engine.shell.catalog import POLICIES, POOLS, Snapshot, bare, dressed, pause_field
from policy_engine.shell.engine import Engine
from trimtab.api.policy.v1 import policy_pb2
from trimtab.config.resources import (
    FieldViolation,
    Pool,
    ResourceError,
    ServicePolicy,
    parse_pool,
    parse_service_policy,
    pool_to_proto,
    service_policy_to_proto,
)
from trimtab.domain.time import timestamp_of
from trimtab.rpc.errors import Aborted, FailedPrecondition, InvalidRequest, NotFound, Unavailable, Violation
from trimtab.store import keys
from trimtab.store.documents import Documents
from trimtab.store.errors import EtagMismatch, FencedOff
from trimtab.store.lease import fenced_write
from trimtab.waiting import to_its_end

Resource = policy_pb2.ServicePolicy | policy_pb2.Pool
R = TypeVar("R", policy_pb2.ServicePolicy, policy_pb2.Pool)
D = TypeVar("D", ServicePolicy, Pool)

LEADER_WAIT_S = 2.0
_LEADER_POLL_S = 0.05


@dataclass(frozen=True)
class _Change(Generic[R]):
    """A resource to write, and what it replaces."""

    wanted: R
    current: R | None
    given_etag: str
    paused: bool
    leave_alone: bool
    validate_only: bool


@dataclass(frozen=True)
class Assumed:
    """What a dry run takes for stored, by name: the resources that would be applied before the one it judges."""

    policies: Mapping[str, ServicePolicy] = field(default_factory=dict)
    pools: Mapping[str, Pool] = field(default_factory=dict)

    @classmethod
    def of(cls, request: policy_pb2.ApplyServicePolicyRequest | policy_pb2.ApplyPoolRequest) -> Assumed:
        """Those of a request. Raises InvalidRequest."""
        if not request.validate_only and (request.assumed_policies or request.assumed_pools):
            raise InvalidRequest(
                [Violation("validate_only", "is required with assumed resources: they are not stored")]
            )
        return cls(
            policies=_parsed("assumed_policies", request.assumed_policies, parse_service_policy),
            pools=_parsed("assumed_pools", request.assumed_pools, parse_pool),
        )


def _parsed(field_name: str, given: Iterable[R], parse: Callable[[R], D]) -> dict[str, D]:
    found: dict[str, D] = {}
    for position, message in enumerate(given):
        try:
            found[message.metadata.name] = parse(message)
        except ResourceError as error:
            raise _invalid(f"{field_name}[{position}]", error.violations) from error
    return found


NOTHING = Assumed()


class Applier:
    """The leader's hand on the catalog. Every change happens between two turns of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def policy(
        self,
        given: policy_pb2.ServicePolicy,
        *,
        validate_only: bool,
        only_if_absent: bool = False,
        assumed: Assumed = NOTHING,
    ) -> tuple[policy_pb2.ServicePolicy, bool]:
        """The policy as it stands afterwards, and whether it changed."""
        try:
            parsed = parse_service_policy(given)
        except ResourceError as error:
            raise _invalid("service_policy", error.violations) from error
        token = await self._token()
        async with self._engine.lock:
            snapshot = await self._engine.catalog.refresh()
            pools = {**snapshot.pools, **assumed.pools}
            faults = check_policy(parsed, tuple(pools.values()), {**snapshot.policies, **assumed.policies})
            if faults:
                raise _invalid("service_policy", faults)
            change = _Change(
                # Through the domain type and back: what is stored has every default spelt out.
                wanted=bare(service_policy_to_proto(parsed)),
                current=snapshot.policy_protos.get(parsed.name),
                given_etag=given.metadata.etag,
                paused=pause_field(POLICIES, parsed.name) in snapshot.pause_reasons,
                leave_alone=only_if_absent,
                validate_only=validate_only,
            )
            return await self._put(self._engine.catalog.policies, change, token)

    async def pool(
        self,
        given: policy_pb2.Pool,
        *,
        validate_only: bool,
        only_if_absent: bool = False,
        assumed: Assumed = NOTHING,
    ) -> tuple[policy_pb2.Pool, bool]:
        """The pool as it stands afterwards, and whether it changed."""
        try:
            parsed = parse_pool(given)
        except ResourceError as error:
            raise _invalid("pool", error.violations) from error
        token = await self._token()
        async with self._engine.lock:
            snapshot = await self._engine.catalog.refresh()
            pools = {**snapshot.pools, **assumed.pools}
            others = [pool for name, pool in sorted(pools.items()) if name != parsed.name]
            policies = {**snapshot.policies, **assumed.policies}
            born = parsed.name in pools
            faults = [*self._unknown_cluster(parsed), *check_pool(parsed, others, policies, born=born)]
            if faults:
                raise _invalid("pool", faults)
            change = _Change(
                wanted=bare(pool_to_proto(parsed)),
                current=snapshot.pool_protos.get(parsed.name),
                given_etag=given.metadata.etag,
                paused=pause_field(POOLS, parsed.name) in snapshot.pause_reasons,
                leave_alone=only_if_absent,
                validate_only=validate_only,
            )
            return await self._put(self._engine.catalog.pools, change, token)

    def _unknown_cluster(self, pool: Pool) -> list[FieldViolation]:
        known = self._engine.settings.actuators
        if pool.spec.cluster in known:
            return []
        described = ", ".join(sorted(known)) or "none"
        description = f"no actuator is configured for {pool.spec.cluster!r}; there are: {described}"
        return [FieldViolation(field="spec.cluster", description=description)]

    async def _put(self, documents: Documents[R], change: _Change[R], token: int) -> tuple[R, bool]:
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
            document = await documents.put(name, wanted, expected_etag=current_etag, token=token)
        except (EtagMismatch, FencedOff) as error:
            raise _lost_race(error) from error
        return dressed(document, paused=change.paused), True

    async def delete_policy(self, name: str, etag: str) -> None:
        """Raises FailedPrecondition while a pool has it as a member."""
        await to_its_end(self._delete_policy(name, etag))

    async def _delete_policy(self, name: str, etag: str) -> None:
        token = await self._token()
        async with self._engine.lock:
            snapshot = await self._engine.catalog.refresh()
            current = snapshot.policy_protos.get(name)
            if current is None:
                raise NotFound("NO_SUCH_POLICY", f"no ServicePolicy {name!r}")
            home = snapshot.pool_of(name)
            if home is not None:
                raise FailedPrecondition("IN_USE", f"{name} is a member of pool {home.name}: change the pool first")
            _check_etag(name, etag, current.metadata.etag)
            try:
                await self._engine.catalog.policies.delete(name, expected_etag=current.metadata.etag, token=token)
            except (EtagMismatch, FencedOff) as error:
                raise _lost_race(error) from error
            await self._drop_pause(POLICIES, name, token)

    async def delete_pool(self, name: str, etag: str) -> None:
        """Ends the management of the pool's GPUs; nothing is put to sleep or removed."""
        await to_its_end(self._delete_pool(name, etag))

    async def _delete_pool(self, name: str, etag: str) -> None:
        token = await self._token()
        async with self._engine.lock:
            snapshot = await self._engine.catalog.refresh()
            current = snapshot.pool_protos.get(name)
            if current is None:
                raise NotFound("NO_SUCH_POOL", f"no Pool {name!r}")
            _check_etag(name, etag, current.metadata.etag)
            try:
                await self._engine.catalog.pools.delete(name, expected_etag=current.metadata.etag, token=token)
            except (EtagMismatch, FencedOff) as error:
                raise _lost_race(error) from error
            await self._drop_pause(POOLS, name, token)

    async def pause(self, kind: str, name: str, reason: str) -> None:
        """The subject keeps its desired state until it is resumed."""
        token = await self._token()
        async with self._engine.lock:
            _require_known(await self._engine.catalog.refresh(), kind, name)
            command = ("HSET", keys.paused(), pause_field(kind, name), reason or "paused")
            try:
                await fenced_write(self._engine.store, keys.POLICY_ENGINE, token, [command])
            except FencedOff as error:
                raise _lost_race(error) from error

    async def resume(self, kind: str, name: str) -> None:
        """Ends a pause; harmless when there is none."""
        token = await self._token()
        async with self._engine.lock:
            _require_known(await self._engine.catalog.refresh(), kind, name)
            await self._drop_pause(kind, name, token)

    async def _drop_pause(self, kind: str, name: str, token: int) -> None:
        command = ("HDEL", keys.paused(), pause_field(kind, name))
        try:
            await fenced_write(self._engine.store, keys.POLICY_ENGINE, token, [command])
        except FencedOff as error:
            raise _lost_race(error) from error

    async def _token(self) -> int:
        """The fencing token. Waits a moment for a lease that nobody holds, as just after a start."""
        give_up = time.monotonic() + LEADER_WAIT_S
        while True:
            token = self._engine.lease.token
            if token is not None:
                return token
            taken = await self._engine.store.redis.exists(keys.lease(keys.POLICY_ENGINE))
            if taken or time.monotonic() > give_up or self._engine.context.stopping.is_set():
                raise Unavailable("NOT_LEADER", "this engine does not lead; ask the leader, or try again")
            await asyncio.sleep(_LEADER_POLL_S)


def _same(one: Resource, other: Resource) -> bool:
    """Whether a user wrote the same."""
    return one.spec.SerializeToString(deterministic=True) == other.spec.SerializeToString(deterministic=True)


def _check_etag(name: str, given: str, current: str) -> None:
    if given and given != current:
        detail = f"its etag is {current}" if current else "it does not exist"
        raise Aborted("ETAG_MISMATCH", f"{name} was changed meanwhile: {detail}, not {given}", {"etag": current})


def _require_known(snapshot: Snapshot, kind: str, name: str) -> None:
    known = snapshot.policies if kind == POLICIES else snapshot.pools
    if name not in known:
        raise NotFound("NO_SUCH_RESOURCE", f"no {'ServicePolicy' if kind == POLICIES else 'Pool'} {name!r}")


def _invalid(prefix: str, faults: tuple[FieldViolation, ...] | list[FieldViolation]) -> InvalidRequest:
    return InvalidRequest(
        [Violation(f"{prefix}.{fault.proto_field}" if fault.field else prefix, fault.description) for fault in faults]
    )


def _lost_race(error: EtagMismatch | FencedOff) -> Aborted | Unavailable:
    if isinstance(error, EtagMismatch):
        return Aborted("ETAG_MISMATCH", str(error), {"etag": error.current_etag})
    return Unavailable("NOT_LEADER", "this engine has just lost the lease; try again")
