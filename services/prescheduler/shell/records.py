"""What the pre-scheduler keeps in the store: results, cycles, groups, answers. Only a leader writes.

Nothing is written when nothing changes: what the store holds is remembered, and read again by every new leader. A
record that cannot be read is refused by itself and kept as it is; its service is held.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from prescheduler.core.model import DeploymentGroup, ServiceResult
from prescheduler.shell import codec
from prescheduler.shell.parse import parse_request
from prescheduler.shell.record_kinds import ANSWER, CYCLE, GROUP, RESULT
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.domain.placement import GroupPlacement
from trimtab.domain.scaling import ScalingRequest
from trimtab.rpc.validate import Violations
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.codec import decode
from trimtab.store.errors import CorruptEntry
from trimtab.store.lease import Argument, fenced_write
from trimtab.store.record_hash import RecordHash
from trimtab.store.record_streams import RecordStream
from trimtab.store.records import Refused

V = TypeVar("V")

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


class Records:
    """Reads of any process, fenced writes of the leader."""

    def __init__(self, store: Store, *, kept_cycles: int) -> None:
        self._store = store
        self._results = _results()
        self._groups = _groups()
        self._asked: dict[str, tuple[bytes, float | None]] = {}
        self.cycles = RecordStream(store, keys.cycles(), CYCLE, maxlen=kept_cycles)

    @property
    def results(self) -> Mapping[str, ServiceResult]:
        """Service → its last result, as this leader knows it."""
        return self._results.values

    async def load(self) -> None:
        """Read what earlier leaders left. Raises ``StoreUnavailable``."""
        results, groups = _results(), _groups()
        for found in (results, groups):
            for name, raw in (await self._hash(found.key)).items():
                found.take(name.decode(errors="replace"), raw)
        self._results, self._groups = results, groups

    async def look_again(self) -> None:
        """Read refused records once more: an operator may have restored or removed them."""
        await self._results.look_again(self._store)
        await self._groups.look_again(self._store)

    def refused(self) -> list[Refused]:
        """Every record that cannot be read."""
        return [*self._results.refused.values(), *self._groups.refused.values()]

    def refused_result(self, service: str) -> bool:
        """Whether the service's result cannot be read, and so is not written either."""
        return service in self._results.refused

    def held(self) -> dict[str, str]:
        """Services of which a record cannot be read → those records, as text. No request of theirs is served."""
        found: dict[str, list[str]] = {}
        for service, refused in sorted(self._results.refused.items()):
            found.setdefault(service, []).append(str(refused))
        for name, refused in sorted(self._groups.refused.items()):
            found.setdefault(_service_of(name), []).append(str(refused))
        return {service: "; ".join(found[service]) for service in sorted(found)}

    def services_by_cluster(self) -> dict[str, frozenset[str]]:
        """Cluster → services that held groups there when it was last seen; survives restarts."""
        found: dict[str, set[str]] = {}
        for name in (*self._groups.values, *self._groups.refused):
            found.setdefault(name.partition("/")[0], set()).add(_service_of(name))
        return {cluster: frozenset(services) for cluster, services in found.items()}

    async def read_requests(self) -> StandingRequests:
        """The standing requests, of any writer. Raises ``StoreUnavailable``."""
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
            )
            for group in groups
            if group.add
        }
        known = self._groups
        new = {name: group for name, group in new.items() if name not in known.values and name not in known.refused}
        if new:
            values = {**known.values, **new}
            await fenced_write(self._store, keys.PRESCHEDULER, token, _changes(known, values))
            known.values = values

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
        new_results = {**self._results.values, **results}
        ended: list[str] = []
        if standing is not None:
            kept = set(standing)
            new_results = {service: result for service, result in new_results.items() if service in kept}
            ended = sorted(set(self._results.refused) - kept)
        new_results = {name: item for name, item in new_results.items() if name not in self._results.refused}
        new_groups = self._merged_groups(groups, set(reachable), pending)
        commands = [*_changes(self._results, new_results), *_changes(self._groups, new_groups)]
        commands += [("HDEL", self._results.key, service) for service in ended]
        if cycle is not None:
            commands.append(self.cycles.append_command(cycle))
        if not commands:
            return False
        await fenced_write(self._store, keys.PRESCHEDULER, token, commands)
        self._results.values, self._groups.values = new_results, new_groups
        for service in ended:
            self._results.forget(service)
        return True

    async def raise_token(self, token: int) -> None:
        """See to it that the next leader's token is higher than ``token``. Raises ``FencedOff`` when it is already."""
        await fenced_write(self._store, keys.PRESCHEDULER, token, ())

    async def read_answer(self, request_id: str) -> tuple[bytes, scheduler_pb2.ScheduleResponse] | None:
        """Digest of the call and the answer that an earlier Schedule call of this id got.

        Raises ``CorruptEntry``, ``StoreUnavailable``.
        """
        key = keys.schedule_answer(request_id)
        stored = await self._hash(key)
        if not stored:
            return None
        answer = ANSWER.decode(stored.get(b"answer"), key=key)
        if isinstance(answer, Refused):
            raise CorruptEntry(str(answer))
        return stored.get(b"call", b""), answer

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
                ("HSET", key, "call", digest, "answer", ANSWER.encode(answer)),
                ("EXPIRE", key, ANSWER_TTL_S),
            ],
        )

    async def _hash(self, key: str) -> dict[bytes, bytes]:
        return cast("dict[bytes, bytes]", await self._store.redis.hgetall(key))

    def _merged_groups(
        self, groups: Sequence[DeploymentGroup], reachable: set[str], pending: Iterable[GroupPlacement]
    ) -> dict[str, scheduler_pb2.DeploymentGroup]:
        announced = {group_field(item.cluster, item.service, item.group) for item in pending}
        merged = {
            name: group
            for name, group in self._groups.values.items()
            if name.partition("/")[0] not in reachable or name in announced
        }
        for group in groups:
            name = group_field(group.cluster, group.service, group.group)
            if name not in self._groups.refused:
                merged[name] = codec.deployment_group_to_wire(group)
        return merged


def group_field(cluster: str, service: str, group: str) -> str:
    """The field of a group in the store; no part holds a slash."""
    return f"{cluster}/{service}/{group}"


def _service_of(name: str) -> str:
    """The service of a group's field."""
    return name.split("/")[1] if name.count("/") == 2 else ""


def _results() -> RecordHash[ServiceResult]:
    return RecordHash(RESULT, keys.schedule_results(), fault=_misplaced_result)


def _groups() -> RecordHash[scheduler_pb2.DeploymentGroup]:
    return RecordHash(GROUP, keys.deployment_groups(), fault=_misplaced_group)


def _misplaced_result(name: str, result: ServiceResult) -> str:
    return "" if result.service == name else f"is of service {result.service!r}"


def _misplaced_group(name: str, group: scheduler_pb2.DeploymentGroup) -> str:
    place = group_field(group.cluster, group.service, group.group)
    return "" if place == name else f"is of {place!r}"


def _changes(records: RecordHash[V], new: Mapping[str, V]) -> list[tuple[Argument, ...]]:
    """HSET and HDEL commands that make ``new`` of what the store holds, each of a bounded length."""
    key, old = records.key, records.values
    gone: list[Argument] = sorted(name for name in old if name not in new)
    changed: list[Argument] = []
    for name in sorted(new):
        if old.get(name) != new[name]:
            changed += [name, records.encode(name, new[name])]
    step = 2 * _FIELDS_A_COMMAND
    return [
        *(("HDEL", key, *gone[start : start + step]) for start in range(0, len(gone), step)),
        *(("HSET", key, *changed[start : start + step]) for start in range(0, len(changed), step)),
    ]
