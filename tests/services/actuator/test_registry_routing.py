"""Routing through the registry, against a real store: what is written with the state, and who counts as confirming."""

import time
from dataclasses import replace
from typing import Any

import pytest

from actuator.core.endpoints import leased, unaware
from actuator.core.model import Gateway, Meta, Replica, State
from actuator.shell.records import Records
from actuator.shell.registry import RegistryRouting
from actuator.shell.routing import StreamRouting
from tests.unit.actuator.actuator_fleet_model import parts
from tests.unit.actuator.actuator_rig import spec
from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.domain.vocabulary import LifeCycle
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.errors import FencedOff, StoreUnavailable
from trimtab.store.registry import EndpointRegistry

LEASE_S, GRACE_S = 3.0, 6.0
ACTIVE = Replica(
    **parts(spec("a", 0)), life_cycle=LifeCycle.ACTIVE, since_s=0.0, cause="", address="http://127.0.0.1:1", ready=True
)
SHOWN = State(replicas={ACTIVE.name: ACTIVE}, meta=Meta(endpoint_revision=100))
HIDDEN = State(
    replicas={ACTIVE.name: replace(ACTIVE, life_cycle=LifeCycle.DRAINING, hidden_revision=101)},
    meta=Meta(endpoint_revision=101),
)


class Rig:
    """One actuator's routing and records, its clock, and gateways that speak into the same store."""

    def __init__(self, store: Store) -> None:
        self.registry = EndpointRegistry(store, "local")
        self.records = Records(store, "local")
        self.now_s = time.time()
        self.state = State()
        self.sequence = 10
        self.start()

    def start(self) -> None:
        """As a new process does."""
        self.stream = StreamRouting(cluster="local", lease_s=LEASE_S)
        self.routing = RegistryRouting(
            self.registry,
            self.stream,
            lease_s=LEASE_S,
            grace_s=GRACE_S,
            now_s=lambda: self.now_s,
            monotonic=lambda: self.now_s,
        )

    async def store(self, new: State, *, token: int = 1) -> None:
        """As the controller does."""
        certain = False
        try:
            await self.records.save(self.state, new, token, self.routing.to_store(new, token))
            certain = True
        finally:
            self.routing.stored(certain=certain)
        self.routing.show(self.state, new)
        self.state = new

    async def look(self) -> None:
        await self.routing.look(self.state.meta.endpoint_revision)

    async def say(self, gateway: str, revision: int, **in_flight: int) -> None:
        self.sequence += 1
        items = [pb.ReplicaInFlight(replica=name, requests=count) for name, count in in_flight.items()]
        word = pb.AcknowledgeEndpointsRequest(
            gateway=gateway, revision=revision, in_flight=items, sequence=self.sequence
        )
        await self.registry.speak(word, is_news=True)

    def awaited(self) -> list[str]:
        """Leased gateways that may still route to the hidden replica."""
        return unaware(HIDDEN.replicas[ACTIVE.name], leased(self.routing.heard(), self.now_s))


@pytest.fixture
async def rig(store: Store) -> Any:
    return Rig(store)


async def test_a_gateway_that_read_the_set_before_the_hide_is_waited_for_though_nobody_knew_it(rig: Rig) -> None:
    await rig.look()
    await rig.store(SHOWN)
    await rig.look()
    await rig.say("new", 0)
    assert (await rig.registry.read()).revision == 100
    await rig.store(HIDDEN)
    await rig.look()
    assert rig.awaited() == ["new"]
    await rig.say("new", 100)
    await rig.look()
    assert rig.awaited() == ["new"], "the set before the one that hides it"
    await rig.say("new", 101, **{ACTIVE.name: 2})
    await rig.look()
    assert rig.awaited() == []
    assert rig.routing.heard()["new"].in_flight == {ACTIVE.name: 2}


async def test_a_lease_is_renewed_by_new_words_only_and_a_revision_never_written_confirms_nothing(rig: Rig) -> None:
    await rig.look()
    await rig.store(HIDDEN)
    rig.now_s += 1.0
    await rig.look()
    await rig.say("g", 10**9)
    await rig.look()
    assert rig.awaited() == ["g"]
    for _ in range(4):
        rig.now_s += 1.0
        await rig.look()
    assert rig.awaited() == [], "it is silent for longer than its lease"
    await rig.say("g", 100)
    await rig.look()
    assert rig.awaited() == ["g"]


async def test_after_a_time_without_a_look_everyone_known_has_a_grace(rig: Rig) -> None:
    await rig.look()
    await rig.store(HIDDEN)
    await rig.say("by-store", 100)
    await rig.look()
    rig.now_s += 60.0
    await rig.look()
    assert rig.awaited() == ["by-store"], "its words may have been lost meanwhile"
    rig.start()
    rig.routing.remember({"by-stream": Gateway(gateway="by-stream", lease_until_s=rig.now_s + GRACE_S)})
    await rig.look()
    assert rig.awaited() == ["by-store", "by-stream"], "a new process hears what was said while none was there"
    for _ in range(7):
        rig.now_s += 1.0
        await rig.look()
    assert rig.awaited() == []


async def test_of_two_ways_the_later_word_counts(rig: Rig) -> None:
    await rig.look()
    await rig.store(HIDDEN)
    await rig.say("g", 101)
    await rig.look()
    late = Gateway(gateway="g", lease_until_s=rig.now_s + LEASE_S, acknowledged_revision=100)
    rig.stream.take_acknowledgement(late, sequence=rig.sequence - 1, now_s=rig.now_s)
    assert rig.awaited() == []
    rig.stream.take_acknowledgement(late, sequence=rig.sequence + 1, now_s=rig.now_s)
    assert rig.awaited() == ["g"]
    rig.now_s += LEASE_S + 1.0
    again = replace(late, lease_until_s=rig.now_s + LEASE_S, acknowledged_revision=101)
    rig.stream.take_acknowledgement(again, sequence=1, now_s=rig.now_s)
    assert rig.routing.heard()["g"] == again, "one that starts anew by a clock behind is heard when its lease was over"


@pytest.mark.parametrize(
    "word",
    [
        b"\xff\xff",
        pb.AcknowledgeEndpointsRequest(
            gateway="g", revision=101, in_flight=[pb.ReplicaInFlight(replica="a", requests=1, pinned=2)]
        ).SerializeToString(),
        pb.AcknowledgeEndpointsRequest(revision=101).SerializeToString(),
    ],
    ids=["no message", "more pinned than there are", "nobody's"],
)
async def test_a_word_that_makes_no_sense_is_of_one_that_lives_and_confirms_nothing(
    rig: Rig, store: Store, word: bytes
) -> None:
    await rig.look()
    await rig.store(HIDDEN)
    await store.redis.hset(keys.gateway_words("local"), "g", word)
    await rig.look()
    assert rig.awaited() == ["g"]


async def test_words_of_forgotten_gateways_go_and_those_of_one_that_speaks_again_stay(rig: Rig) -> None:
    await rig.say("gone", 100)
    await rig.say("back", 100)
    await rig.look()
    known = replace(SHOWN, gateways=dict(rig.routing.heard()))
    await rig.store(known)
    await rig.say("back", 100)
    await rig.store(replace(known, gateways={}))
    await rig.look()
    _, words = await rig.registry.look()
    assert sorted(words) == ["back"]
    assert sorted(rig.routing.heard()) == ["back"]


async def test_the_set_is_written_in_one_step_with_the_records_and_only_when_it_changes(rig: Rig, store: Store) -> None:
    await rig.look()
    await rig.store(SHOWN)
    head, _ = await rig.registry.look()
    assert list(rig.routing.to_store(SHOWN, 1)) == []
    await store.redis.set(keys.lease_token(keys.actuator("local")), "5")
    with pytest.raises(FencedOff):
        await rig.store(HIDDEN, token=1)
    assert (await rig.registry.look())[0] == head
    assert (await rig.records.load()).state.meta.endpoint_revision == 100, "neither the records nor the set"
    # Whether it was done is not known: the next one writes everything.
    await store.redis.hset(keys.endpoints("local"), "stray", b"")
    await rig.store(SHOWN, token=5)
    found = await rig.registry.read()
    assert [service.service for service in found.services] == [ACTIVE.spec.service]
    assert (await rig.registry.head()).reign == 5


async def test_what_an_actuator_of_another_version_left_there_is_replaced(rig: Rig, store: Store) -> None:
    await store.redis.hset(keys.endpoints("local"), mapping={"@head": b"\xff", "old-service": b"\xff"})
    await rig.look()
    await rig.store(SHOWN)
    await rig.look()
    found = await rig.registry.read()
    assert [service.service for service in found.services] == [ACTIVE.spec.service]


@pytest.mark.parametrize("loss", ["everything", "the last write", "written over", "garbled"])
async def test_a_store_that_lost_the_set_is_noticed_before_anything_is_decided(
    rig: Rig, store: Store, loss: str
) -> None:
    await rig.look()
    await rig.store(SHOWN)
    before = await store.redis.hgetall(keys.endpoints("local"))
    await rig.store(HIDDEN)
    await rig.look()
    if loss == "everything":
        await store.redis.flushdb()
    elif loss == "the last write":
        await store.redis.hset(keys.endpoints("local"), mapping=before)
    elif loss == "written over":
        head = rig.registry.new_head(revision=101, leader_term=2, lease_s=LEASE_S, now_s=rig.now_s)
        await store.redis.hset(keys.endpoints("local"), "@head", head.SerializeToString())
    else:
        await store.redis.hset(keys.endpoints("local"), "@head", b"\xff")
    with pytest.raises(StoreUnavailable, match="does not hold the endpoint set"):
        await rig.look()
    await rig.store(HIDDEN, token=3 if loss == "written over" else 1)
    await rig.look()
    found = await rig.registry.read()
    assert found.revision == 101
    assert [one.state for service in found.services for one in service.endpoints] == [pb.ENDPOINT_STATE_DRAINING]
