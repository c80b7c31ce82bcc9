"""What the pre-scheduler keeps in the store: results, cycles, groups, answers. Only a leader writes.

Nothing is written when nothing changes: what the store holds is remembered, and read again by every new leader.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import structlog

from prescheduler.core.model import DeploymentGroup, ServiceResult
from prescheduler.shell import wire
from prescheduler.shell.parse import parse_request
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.domain.placement import GroupPlacement
from trimtab.domain.scaling import ScalingRequest
from trimtab.rpc.validate import Violations
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry
from trimtab.store.lease import Argument, fenced_write
from trimtab.store.streams import BoundedStream

log = structlog.get_logger(__name__)

ANSWER_TTL_S = 3600
_FIELDS_A_COMMAND = 500


@dataclass(frozen=True, kw_only=True)
class StandingRequests:
    """The policy engine's requests. ``broken``: service → why its entry does not parse."""

    requests: tuple[ScalingRequest, ...]
    broken: Mapping[str, str]
    highest_tokens: Mapping[str, int]
    fingerprint: int
    """Changes when a request asks for something else; a renewed expiry alone does not change it."""


@dataclass(kw_only=True)
class _Known:
    results: dict[str, ServiceResult] = field(default_factory=dict)
    groups: dict[str, bytes] = field(default_factory=dict)


class Ledger:
    """Reads of any process, fenced writes of the leader."""

    def __init__(self, store: Store, *, kept_cycles: int) -> None:
        self._store = store
        self._known = _Known()
        self._asked: dict[str, tuple[bytes, float | None]] = {}
        self.cycles = BoundedStream(store, keys.cycles(), scheduler_pb2.Cycle, maxlen=kept_cycles)

    @property
    def results(self) -> Mapping[str, ServiceResult]:
        """Service → its last result, as this leader knows it."""
        return self._known.results

    async def load(self) -> None:
        """Read what earlier leaders left. What does not parse is dropped, with a line in the log."""
        known = _Known()
        for name, data in (await self._hash(keys.schedule_results())).items():
            try:
                message = decode(scheduler_pb2.ScalingResult, data, place=f"{keys.schedule_results()} {name!r}")
                known.results[name.decode()] = wire.result_from_wire(message)
            except (CorruptEntry, ValueError) as error:
                log.warning("stored result is dropped", service=name.decode(errors="replace"), error=str(error))
        known.groups = {
            name.decode(errors="replace"): data for name, data in (await self._hash(keys.deployment_groups())).items()
        }
        self._known = known

    def services_by_cluster(self) -> dict[str, frozenset[str]]:
        """Cluster → services that held groups there when it was last seen; survives restarts."""
        found: dict[str, set[str]] = {}
        for group in self.groups():
            found.setdefault(group.cluster, set()).add(group.service)
        return {cluster: frozenset(services) for cluster, services in found.items()}

    def groups(self) -> list[scheduler_pb2.DeploymentGroup]:
        """Every group as last seen."""
        found = []
        for name in sorted(self._known.groups):
            try:
                found.append(decode(scheduler_pb2.DeploymentGroup, self._known.groups[name], place=name))
            except CorruptEntry as error:
                log.warning("stored group is dropped", error=str(error))
        return found

    async def read_requests(self) -> StandingRequests:
        """The standing requests, whoever wrote them. Raises ``StoreUnavailable``."""
        entries = await self._hash(keys.scaling_requests())
        requests: list[ScalingRequest] = []
        broken: dict[str, str] = {}
        tokens: dict[str, int] = {}
        substance: list[tuple[bytes, bytes]] = []
        ages: dict[str, tuple[bytes, float | None]] = {}
        for name in sorted(entries):
            service = name.decode(errors="replace")
            violations = Violations()
            try:
                message = decode(
                    scheduler_pb2.ScalingRequest, entries[name], place=f"{keys.scaling_requests()} {service}"
                )
            except CorruptEntry as error:
                broken[service] = str(error)
                continue
            violations.require("service", message.service == service, f"is {message.service!r} under key {service!r}")
            parsed = parse_request(message, violations)
            if parsed is None or violations:
                broken[service] = "; ".join(f"{item.field}: {item.description}" for item in violations.found)
                continue
            tokens[parsed.writer] = max(tokens.get(parsed.writer, 0), parsed.token)
            for name_of_field in ("expire_time", "create_time", "replica_revisions"):
                message.ClearField(name_of_field)
            substance.append((name, message.SerializeToString(deterministic=True)))
            message.ClearField("fencing")
            asked = message.SerializeToString(deterministic=True)
            asked_before, since_s = self._asked.get(service, (b"", None))
            if asked_before == asked and since_s is not None:
                # A request that is sent again as it is has waited since it was first seen.
                parsed = replace(parsed, created_s=min(since_s, parsed.created_s or since_s))
            ages[service] = (asked, parsed.created_s)
            requests.append(parsed)
        self._asked = ages
        return StandingRequests(
            requests=tuple(requests),
            broken=broken,
            highest_tokens=tokens,
            fingerprint=hash((tuple(substance), tuple(sorted(broken.items())))),
        )

    async def announce(self, token: int, groups: Sequence[GroupPlacement]) -> None:
        """Before replicas are placed in a cluster for the first time, write down that the service is there.

        Else a crash right after the write, with the cluster gone silent, would place them once more elsewhere.
        """
        new = {
            group_field(group.cluster, group.service, group.group): scheduler_pb2.DeploymentGroup(
                group=group.group, service=group.service, cluster=group.cluster, domain=group.domain
            ).SerializeToString(deterministic=True)
            for group in groups
            if group.add
        }
        new = {name: data for name, data in new.items() if name not in self._known.groups}
        if new:
            known = {**self._known.groups, **new}
            commands = _changes(keys.deployment_groups(), self._known.groups, known)
            await fenced_write(self._store, keys.PRESCHEDULER, token, commands)
            self._known.groups = known

    async def write_cycle(
        self,
        token: int,
        *,
        results: Mapping[str, ServiceResult],
        standing: Iterable[str] | None,
        groups: Sequence[DeploymentGroup],
        reachable: Iterable[str],
        pending: Iterable[GroupPlacement],
        cycle: scheduler_pb2.Cycle | None,
    ) -> bool:
        """Write what changed, all or none; True when something was.

        ``results``: what the cycle found. ``standing``: the services that have a request, whose results are kept
        (None: keep all). ``groups``: those of the ``reachable`` clusters; those of others stay as they were last
        seen. ``pending``: what this cycle sent, which no cluster has listed yet. ``cycle`` is appended when it is not
        None. Raises ``FencedOff``, ``StoreUnavailable``.
        """
        new_results = {**self._known.results, **results}
        if standing is not None:
            kept = set(standing)
            new_results = {service: result for service, result in new_results.items() if service in kept}
        new_groups = self._merged_groups(groups, set(reachable), pending)
        old_results = {name: _result_bytes(result) for name, result in self._known.results.items()}
        commands = [
            *_changes(
                keys.schedule_results(),
                old_results,
                {name: _result_bytes(result) for name, result in new_results.items()},
            ),
            *_changes(keys.deployment_groups(), self._known.groups, new_groups),
        ]
        if cycle is not None:
            commands.append(self.cycles.append_command(cycle))
        if not commands:
            return False
        await fenced_write(self._store, keys.PRESCHEDULER, token, commands)
        self._known = _Known(results=new_results, groups=new_groups)
        return True

    async def raise_token(self, token: int) -> None:
        """See to it that the next leader's token is higher than ``token``. Raises ``FencedOff`` when it is already."""
        await fenced_write(self._store, keys.PRESCHEDULER, token, ())

    async def read_answer(self, request_id: str) -> tuple[bytes, scheduler_pb2.ScheduleResponse] | None:
        """Digest of the call and the answer that an earlier Schedule call of this id got."""
        key = keys.schedule_answer(request_id)
        stored = await self._hash(key)
        if not stored:
            return None
        return stored[b"call"], decode(scheduler_pb2.ScheduleResponse, stored[b"answer"], place=key)

    async def write_answer(
        self, token: int, request_id: str, digest: bytes, answer: scheduler_pb2.ScheduleResponse
    ) -> None:
        """Keep an answer for an hour."""
        key = keys.schedule_answer(request_id)
        await fenced_write(
            self._store,
            keys.PRESCHEDULER,
            token,
            [
                ("HSET", key, "call", digest, "answer", answer.SerializeToString()),
                ("EXPIRE", key, ANSWER_TTL_S),
            ],
        )

    async def _hash(self, key: str) -> dict[bytes, bytes]:
        return cast("dict[bytes, bytes]", await self._store.redis.hgetall(key))

    def _merged_groups(
        self, groups: Sequence[DeploymentGroup], reachable: set[str], pending: Iterable[GroupPlacement]
    ) -> dict[str, bytes]:
        announced = {group_field(item.cluster, item.service, item.group) for item in pending}
        merged = {
            name: data
            for name, data in self._known.groups.items()
            if name.partition("/")[0] not in reachable or name in announced
        }
        for group in groups:
            message = wire.deployment_group_to_wire(group)
            merged[group_field(group.cluster, group.service, group.group)] = message.SerializeToString(
                deterministic=True
            )
        return merged


def group_field(cluster: str, service: str, group: str) -> str:
    """The field of a group in the store; no part holds a slash."""
    return f"{cluster}/{service}/{group}"


def _result_bytes(result: ServiceResult) -> bytes:
    return wire.result_to_wire(result).SerializeToString(deterministic=True)


def _changes(key: str, old: Mapping[str, bytes], new: Mapping[str, bytes]) -> list[tuple[Argument, ...]]:
    """HSET and HDEL commands that make ``new`` of ``old``, each of a bounded length."""
    gone: list[Argument] = sorted(name for name in old if name not in new)
    changed: list[Argument] = []
    for name in sorted(new):
        if old.get(name) != new[name]:
            changed += [name, new[name]]
    step = 2 * _FIELDS_A_COMMAND
    return [
        *(("HDEL", key, *gone[start : start + step]) for start in range(0, len(gone), step)),
        *(("HSET", key, *changed[start : start + step]) for start in range(0, len(changed), step)),
    ]
