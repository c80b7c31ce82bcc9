"""The endpoint registry in a real store: what is written, by whom, and what a gateway and an actuator read of it."""

import asyncio
from collections.abc import Mapping

import pytest

from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.api.actuator.v1 import registry_pb2
from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.errors import CorruptEntry, FencedOff
from trimtab.store.lease import StoreLease, fenced_write
from trimtab.store.news import follow_news
from trimtab.store.registry import HEAD, EndpointRegistry, service_bytes

OWNER = keys.actuator("local")


def services(**states: int) -> dict[str, bytes]:
    """Service → one replica of its own name in that state."""
    return service_bytes(
        [
            pb.ServiceEndpoints(
                service=name, endpoints=[pb.Endpoint(replica=f"{name}-0", address="http://h:1", state=state)]
            )
            for name, state in states.items()
        ]
    )


async def write(
    store: Store, old: Mapping[str, bytes] | None, new: Mapping[str, bytes], *, revision: int, token: int = 1
) -> None:
    registry = EndpointRegistry(store, "local")
    head = registry.new_head(revision=revision, leader_term=token, lease_s=3.0, now_s=1_700_000_000.5)
    await fenced_write(store, OWNER, token, registry.commands(old, new, head))


def listed(response: pb.WatchEndpointsResponse | None) -> dict[str, int]:
    assert response is not None
    return {one.replica: one.state for service in response.services for one in service.endpoints}


async def test_a_set_is_read_back_whole_and_a_change_writes_only_what_changed(store: Store) -> None:
    registry = EndpointRegistry(store, "local")
    assert await registry.read() is None
    first = services(chat=pb.ENDPOINT_STATE_ROUTABLE, code=pb.ENDPOINT_STATE_ROUTABLE)
    await write(store, None, first, revision=7)
    found = await registry.read()
    assert found is not None
    assert (found.revision, found.cluster, found.lease_s) == (7, "local", 3.0)
    assert listed(found) == {"chat-0": pb.ENDPOINT_STATE_ROUTABLE, "code-0": pb.ENDPOINT_STATE_ROUTABLE}
    # Somebody else's hand on a service that does not change: a difference leaves it, a whole set does not.
    await store.redis.hset(keys.endpoints("local"), "code", b"")
    second = services(chat=pb.ENDPOINT_STATE_DRAINING, code=pb.ENDPOINT_STATE_ROUTABLE)
    await write(store, first, second, revision=8)
    assert listed(await registry.read()) == {"chat-0": pb.ENDPOINT_STATE_DRAINING}
    await store.redis.hset(keys.endpoints("local"), "stray", b"")
    await write(store, None, second, revision=9)
    whole = await registry.read()
    assert [service.service for service in whole.services] == ["chat", "code"]
    await write(store, second, services(code=pb.ENDPOINT_STATE_ROUTABLE), revision=10)
    assert listed(await registry.read()) == {"code-0": pb.ENDPOINT_STATE_ROUTABLE}


async def test_an_old_reign_writes_nothing_any_more(store: Store) -> None:
    old, new = StoreLease(store, OWNER, "a", 0.2), StoreLease(store, OWNER, "b", 30.0)
    old_token = await old.acquire_or_renew()
    await asyncio.sleep(0.3)
    new_token = await new.acquire_or_renew()
    assert old_token is not None
    assert new_token is not None
    hidden = services(chat=pb.ENDPOINT_STATE_DRAINING)
    await write(store, None, hidden, revision=20, token=new_token)
    heard, stopping = asyncio.Event(), asyncio.Event()
    channel = keys.endpoints_written("local")
    following = asyncio.create_task(follow_news(store, channel, heard.set, stopping=stopping))
    async with asyncio.timeout(30):
        while await store.redis.pubsub_numsub(channel) != [(channel.encode(), 1)]:  # noqa: ASYNC110  (it has no event)
            await asyncio.sleep(0.01)
    with pytest.raises(FencedOff):
        await write(store, None, services(chat=pb.ENDPOINT_STATE_ROUTABLE), revision=99, token=old_token)
    registry = EndpointRegistry(store, "local")
    found = await registry.read()
    assert found is not None
    assert found.revision == 20
    assert listed(found) == {"chat-0": pb.ENDPOINT_STATE_DRAINING}
    await asyncio.sleep(0.1)
    assert not heard.is_set(), "and announces nothing"
    await write(store, hidden, services(chat=pb.ENDPOINT_STATE_ROUTABLE), revision=21, token=new_token)
    await asyncio.wait_for(heard.wait(), 30)
    stopping.set()
    await following


async def test_a_gateway_speaks_and_sees_in_one_step_who_writes_there(store: Store) -> None:
    registry = EndpointRegistry(store, "local")
    heard = await registry.speak(pb.AcknowledgeEndpointsRequest(gateway="g", sequence=1), is_news=False)
    assert (heard.head, heard.has_leader) == (None, False)
    await write(store, None, services(chat=pb.ENDPOINT_STATE_ROUTABLE), revision=7)
    lease = StoreLease(store, OWNER, "a", 30.0)
    await lease.acquire_or_renew()
    word = pb.AcknowledgeEndpointsRequest(gateway="g", revision=7, sequence=2)
    heard = await registry.speak(word, is_news=True)
    assert heard.head is not None
    assert (heard.head.revision, heard.head.reign, heard.has_leader) == (7, 1, True)
    raw, words = await registry.look()
    assert raw == heard.head.SerializeToString()
    assert await registry.head() == heard.head
    assert words == {"g": word.SerializeToString()}
    await lease.release()
    assert (await registry.speak(word, is_news=False)).has_leader is False


async def test_a_word_is_forgotten_unless_its_gateway_has_spoken_since(store: Store) -> None:
    registry = EndpointRegistry(store, "local")
    first, second = (pb.AcknowledgeEndpointsRequest(gateway="g", sequence=number) for number in (1, 2))
    await registry.speak(first, is_news=False)
    _, words = await registry.look()
    await registry.speak(second, is_news=False)
    await registry.forget("g", words["g"])
    _, words = await registry.look()
    assert words == {"g": second.SerializeToString()}
    await registry.forget("g", words["g"])
    assert (await registry.look())[1] == {}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (HEAD, registry_pb2.RegistryHead(schema_version=2, revision=7).SerializeToString(), "layout 2"),
        (HEAD, b"\xff\xff", "RegistryHead"),
        ("chat", b"\xff\xff", "field chat"),
    ],
)
async def test_what_cannot_be_read_is_named(store: Store, field: str, value: bytes, said: str) -> None:
    await write(store, None, services(chat=pb.ENDPOINT_STATE_ROUTABLE), revision=7)
    await store.redis.hset(keys.endpoints("local"), field, value)
    with pytest.raises(CorruptEntry, match=said):
        await EndpointRegistry(store, "local").read()
