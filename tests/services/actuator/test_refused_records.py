"""An actuator that finds records it cannot read: it neither ends nor overwrites them, holds, and says so."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from actuator.core.admission_pool import PoolRequest, apply_pool_state
from actuator.core.fencing import Refused
from actuator.core.model import Meta, Operation, OperationKind, OperationState, Pool, Replica, State
from actuator.core.refused import RefusedKind
from actuator.core.world import Listed, ProbeResult, RunState, World
from actuator.shell.controller import Controller, ControllerParts
from actuator.shell.metrics import ActuatorMetrics
from actuator.shell.publisher import Publisher
from actuator.shell.records import Records
from actuator.shell.routing import StreamRouting
from tests.services.actuator.controller_helpers import counted, eventually
from tests.unit.actuator.actuator_fleet_model import parts
from tests.unit.actuator.actuator_rig import LIMITS, overlay_of, spec
from trimtab.api.store.v1 import actuator_pb2 as store_pb
from trimtab.domain.pool import DesiredPool
from trimtab.domain.vocabulary import LifeCycle
from trimtab.rpc.errors import Unavailable
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.lease import StoreLease
from trimtab.store.records import seal, unseal

NAME = keys.actuator("local")
SPEC = spec("a-0", 0)
STATE = State(
    replicas={
        "a-0": Replica(
            **parts(SPEC), life_cycle=LifeCycle.ACTIVE, since_s=50.0, cause="created", address="http://a-0", ready=True
        )
    },
    pools={
        "p": Pool(
            pool="p",
            state_revision=3,
            overlay=(SPEC,),
            awake=("a-0",),
            floors=(),
            budget_gpus=1,
            decision_id="d-1",
            drain_timeout_s=1.0,
            sleep_level=1,
            effective_awake=("a-0",),
            settled_revision=3,
            operation_id="o-1",
        )
    },
    operations={
        "o-1": Operation(
            operation_id="o-1",
            kind=OperationKind.OVERLAY,
            subject="p",
            create_s=40.0,
            update_s=50.0,
            deadline_s=90.0,
            state=OperationState.SUCCEEDED,
            pool_revision=3,
        )
    },
    meta=Meta(endpoint_revision=7_000_000, replica_revision=7_000_000, operation_counter=5),
)
REQUEST = PoolRequest(
    desired=DesiredPool(
        pool="p",
        state_revision=4,
        overlay=overlay_of([SPEC]),
        awake=(),
        floors=(),
        budget_gpus=1,
        decision_id="d-2",
        drain_timeout_s=1.0,
    ),
    writer="policy-engine",
    token=1,
)


class Cluster:
    """One actuator's controller on a real store, and the server of its only replica."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_s = 100.0
        self.lease = StoreLease(store, NAME, "me", 30.0)
        self.registry = CollectorRegistry()
        self.records = Records(store, "local")
        parts: Any = ControllerParts(
            lease=self.lease,
            records=self.records,
            observer=SimpleNamespace(complete=True, world=lambda _busy: self.world(), look_soon=lambda: None),
            publisher=Publisher(cluster="local", probe=lambda _name: None),
            routing=StreamRouting(cluster="local", lease_s=3.0),
            metrics=ActuatorMetrics(self.registry),
            limits=LIMITS,
            now_s=lambda: self.now_s,
        )
        self.controller = Controller(parts, interval_s=0.01)
        self.steps = 0

    def world(self) -> World:
        self.steps += 1
        listed = Listed(**parts(SPEC), address="http://a-0", run_state=RunState.RUNNING)
        probe = ProbeResult(as_of_s=self.now_s, healthy=True, sleeping=False, in_flight=0)
        return World(listed={"a-0": listed}, listed_as_of_s=self.now_s, probes={"a-0": probe})

    async def raw(self, kind: RefusedKind) -> bytes | None:
        key, field, _ = WHERE[kind]
        found: bytes | None = await self.store.redis.hget(key, field)
        return found

    async def put(self, kind: RefusedKind, raw: bytes | None) -> None:
        """As an operator, or another release, would; None removes it."""
        key, field, _ = WHERE[kind]
        if raw is None:
            await self.store.redis.hdel(key, field)
        else:
            await self.store.redis.hset(key, field, raw)

    async def stored(self) -> None:
        """The records are written, by an actuator that is gone."""
        token = await self.lease.acquire_or_renew()
        assert token is not None
        await self.records.save(State(), STATE, token)

    async def some_steps(self) -> None:
        """The controller comes round several times, each later than the time between two readings."""
        for _ in range(3):
            before = self.steps
            self.now_s += 11.0
            self.controller.kick()
            await eventually(lambda before=before: self.steps > before)

    def refused_shown(self, kind: RefusedKind, reason: str) -> float | None:
        return self.registry.get_sample_value(
            "trimtab_actuator_refused_records", {"kind": kind.value, "reason": reason}
        )


@asynccontextmanager
async def at_work(cluster: Cluster) -> AsyncIterator[asyncio.Task[None]]:
    stopping = asyncio.Event()
    await cluster.lease.acquire_or_renew()
    task = asyncio.create_task(cluster.controller.run(stopping))
    try:
        yield task
        assert not task.done(), "the process goes on"
    finally:
        stopping.set()
        cluster.controller.kick()
        await asyncio.wait_for(task, 30)


def newer(raw: bytes, message_type: type[Any]) -> bytes:
    message = message_type.FromString(unseal(raw))
    message.schema = 2
    return seal(message)


FAULTS: dict[str, tuple[str, Callable[[bytes, type[Any]], bytes]]] = {
    "newer": ("newer", newer),
    "cut off": ("corrupt", lambda raw, _type: raw[:-7]),
    "nothing": ("corrupt", lambda _raw, _type: b""),
}
WHERE: dict[RefusedKind, tuple[str, str, type[Any]]] = {
    RefusedKind.REPLICA: (keys.replicas("local"), "a-0", store_pb.ReplicaRecord),
    RefusedKind.POOL: (keys.pool_states("local"), "p", store_pb.PoolRecord),
    RefusedKind.OPERATION: (keys.operations("local"), "o-1", store_pb.OperationRecord),
    RefusedKind.META: (keys.revisions("local"), "meta", store_pb.ActuatorMetaRecord),
}
HELD_SUBJECTS = [RefusedKind.REPLICA, RefusedKind.POOL, RefusedKind.OPERATION]


def apply(state: State, world: World, now_s: float) -> tuple[State, None]:
    return apply_pool_state(state, REQUEST, world, now_s=now_s, limits=LIMITS).state, None


async def spoil(cluster: Cluster, kind: RefusedKind, fault: str) -> bytes:
    raw = await cluster.raw(kind)
    assert raw is not None
    bad = FAULTS[fault][1](raw, WHERE[kind][2])
    await cluster.put(kind, bad)
    return bad


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", HELD_SUBJECTS)
async def test_a_bad_record_is_held_said_and_left_until_it_is_removed(
    store: Store, kind: RefusedKind, fault: str
) -> None:
    cluster = Cluster(store)
    await cluster.stored()
    bad = await spoil(cluster, kind, fault)
    async with at_work(cluster):
        await eventually(lambda: cluster.controller.serving)
        [record] = cluster.controller.state.refused
        assert (record.kind, record.reason) == (kind, FAULTS[fault][0])
        assert WHERE[kind][0] in record.why
        assert cluster.refused_shown(kind, record.reason) == 1
        await cluster.some_steps()
        with pytest.raises(Refused, match="is held") as caught:
            await cluster.controller.change(apply)
        assert caught.value.reason == "RECORD_REFUSED"
        assert record.remedy in caught.value.message
        assert await cluster.raw(kind) == bad
        assert cluster.controller.state.refused == (record,)

        await cluster.put(kind, None)
        await cluster.some_steps()
        await eventually(lambda: cluster.controller.state.refused == ())
        assert cluster.refused_shown(kind, record.reason) is None
        await cluster.controller.change(apply)
        assert cluster.controller.state.pools["p"].state_revision == 4
    assert (await Records(store, "local").load()).state.refused == ()


@pytest.mark.parametrize("kind", HELD_SUBJECTS)
async def test_a_record_that_is_restored_is_taken_up(store: Store, kind: RefusedKind) -> None:
    cluster = Cluster(store)
    await cluster.stored()
    good = await cluster.raw(kind)
    await spoil(cluster, kind, "cut off")
    async with at_work(cluster):
        await eventually(lambda: cluster.controller.serving)
        await cluster.put(kind, good)
        await cluster.some_steps()
        await eventually(lambda: cluster.controller.state.refused == ())
        state = cluster.controller.state
        assert "a-0" in state.replicas
        assert state.pools["p"].state_revision == 3
        assert "o-1" in state.operations


@pytest.mark.parametrize("fault", FAULTS)
async def test_bad_metadata_hold_the_cluster_until_they_are_seen_to(store: Store, fault: str) -> None:
    cluster = Cluster(store)
    await cluster.stored()
    before = await store.redis.hgetall(keys.replicas("local"))
    bad = await spoil(cluster, RefusedKind.META, fault)
    async with at_work(cluster):
        reason = FAULTS[fault][0]
        await eventually(lambda: cluster.refused_shown(RefusedKind.META, reason) == 1)
        assert not cluster.controller.serving
        for call in (lambda: cluster.controller.state, cluster.controller.require_serving):
            with pytest.raises(Unavailable, match=r"the cluster is held: .*HDEL") as caught:
                call()
            assert caught.value.reason == "RECORD_REFUSED"
        with pytest.raises(Unavailable, match="the cluster is held"):
            await cluster.controller.change(counted)
        assert await cluster.raw(RefusedKind.META) == bad
        assert await store.redis.hgetall(keys.replicas("local")) == before, "nothing is written"

        await cluster.put(RefusedKind.META, None)
        cluster.controller.kick()
        await eventually(lambda: cluster.controller.serving)
        assert cluster.refused_shown(RefusedKind.META, reason) is None
        assert cluster.controller.state.replicas["a-0"].routable


async def test_restored_metadata_go_on_without_a_revision_that_falls(store: Store) -> None:
    cluster = Cluster(store)
    await cluster.stored()
    good = await cluster.raw(RefusedKind.META)
    await spoil(cluster, RefusedKind.META, "cut off")
    async with at_work(cluster):
        await eventually(lambda: cluster.refused_shown(RefusedKind.META, "corrupt") == 1)
        await cluster.put(RefusedKind.META, good)
        cluster.controller.kick()
        await eventually(lambda: cluster.controller.serving)
        meta = cluster.controller.state.meta
        assert meta.endpoint_revision > STATE.meta.endpoint_revision
        assert meta.operation_counter == 5


async def test_a_token_that_cannot_be_read_holds_the_cluster(store: Store) -> None:
    cluster = Cluster(store)
    await cluster.stored()
    await store.redis.hset(keys.revisions("local"), "token", b"soon")
    async with at_work(cluster):
        await eventually(lambda: cluster.refused_shown(RefusedKind.META, "corrupt") == 1)
        with pytest.raises(Unavailable, match="field token: b'soon' is no fencing token"):
            cluster.controller.require_serving()
        await store.redis.hdel(keys.revisions("local"), "token")
        cluster.controller.kick()
        await eventually(lambda: cluster.controller.serving)


@pytest.mark.parametrize("kind", list(RefusedKind))
async def test_a_record_with_a_field_of_a_later_release_is_read_and_keeps_it(store: Store, kind: RefusedKind) -> None:
    cluster = Cluster(store)
    await cluster.stored()
    raw = await cluster.raw(kind)
    assert raw is not None
    message = WHERE[kind][2].FromString(unseal(raw) + b"\xc2\x3e\x05later")
    await cluster.put(kind, seal(message))
    async with at_work(cluster):
        await eventually(lambda: cluster.controller.serving)
        assert cluster.controller.state.refused == ()

        def change(state: State, _world: World, _now_s: float) -> tuple[State, None]:
            operation = replace(state.operations["o-1"], detail="seen")
            replica = replace(state.replicas["a-0"], detail="seen")
            pool = replace(state.pools["p"], decision_id="d-9")
            meta = replace(state.meta, operation_counter=99)
            return replace(
                state, operations={"o-1": operation}, replicas={"a-0": replica}, pools={"p": pool}, meta=meta
            ), None

        await cluster.controller.change(change)
    again = await cluster.raw(kind)
    assert again is not None
    assert again != seal(message)
    assert b"\xc2\x3e\x05later" in again


async def test_a_record_that_goes_bad_while_the_store_is_away_is_not_overwritten_from_memory(store: Store) -> None:
    cluster = Cluster(store)
    await cluster.stored()
    async with at_work(cluster):
        await eventually(lambda: cluster.controller.serving)
        bad = await spoil(cluster, RefusedKind.REPLICA, "cut off")
        await cluster.lease.release()
        cluster.controller.kick()
        with pytest.raises(Unavailable):
            await cluster.controller.change(counted)
        await cluster.lease.acquire_or_renew()
        cluster.controller.kick()
        await eventually(lambda: cluster.controller.state.refused)
        assert cluster.controller.state.replicas == {}
        assert await cluster.controller.change(counted) > 5
        await cluster.some_steps()
        assert await cluster.raw(RefusedKind.REPLICA) == bad
