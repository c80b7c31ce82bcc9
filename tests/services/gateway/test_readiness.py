"""When a gateway is ready: from what it has of its clusters, and over real sockets with a store and an actuator."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.core.readiness import Standing, readiness
from gateway.core.routing import Router, RoutingLimits
from gateway.shell.settings import GatewaySettings
from tests.services.gateway.test_registry import ROUTABLE, Writer, gauge
from trimtab.config.settings import SettingsError, load_settings
from trimtab.domain.endpoint import Endpoint
from trimtab.domain.vocabulary import Role
from trimtab.store.client import Store
from trimtab.store.embedded import EmbeddedStore

CHAT = frozenset({"chat"})


def standing(cluster="local", revision=7, services=CHAT, quiet=None, *, stale=False):
    return Standing(cluster=cluster, revision=revision, services=services, quiet=quiet or {}, stale=stale)


@pytest.mark.parametrize(
    ("standings", "ready", "said"),
    [
        ([standing()], True, "local: the endpoint set of revision 7\n"),
        (
            [standing(revision=None, services=frozenset(), quiet={"registry": "the store holds no set"}, stale=True)],
            False,
            "local: no endpoint set yet (registry: the store holds no set)\n",
        ),
        (
            [standing(quiet={"registry": "no actuator speaks for the cluster"}, stale=True)],
            True,
            "local: the endpoint set of revision 7, which is stale (registry: no actuator speaks for the cluster)\n",
        ),
        ([standing(quiet={"registry": "away"})], True, "local: the endpoint set of revision 7\n"),
        (
            [standing(services=None)],
            False,
            "local: the endpoint set of revision 7 is not trusted: the process stood still, and asks for a newer one\n",
        ),
        (
            [standing(services=frozenset())],
            False,
            "local: the endpoint set of revision 7 names no service: apply a ServicePolicy\n",
        ),
        (
            [standing("east", None, frozenset()), standing("west")],
            True,
            "east: no endpoint set yet\nwest: the endpoint set of revision 7\n",
        ),
    ],
    ids=["a set", "none", "a stale one", "one way quiet", "after a stall", "an empty one", "one cluster of two"],
)
def test_a_gateway_is_ready_with_a_set_to_route_by(standings, ready, said) -> None:
    assert readiness(standings, stopping=False) == (ready, said)
    assert readiness(standings, stopping=True) == (False, "stopping\n")


def test_a_set_names_its_services_while_it_is_trusted() -> None:
    router = Router(RoutingLimits(), services=["always"])
    endpoint = Endpoint(
        cluster="local", replica="a", service="chat", model="m", address="http://a", role=Role.COLOCATED
    )
    assert router.named_by("local") == frozenset()
    router.apply("local", 1, ["asleep"], [endpoint])
    assert router.named_by("local") == {"chat", "asleep"}
    assert router.named_by("far") == frozenset()
    router.distrust()
    assert router.named_by("local") is None
    router.trust("local")
    assert router.named_by("local") == {"chat", "asleep"}


@pytest.mark.parametrize(
    ("flags", "actuators", "clusters"),
    [
        ([], {"local": "127.0.0.1:7004"}, ("local",)),
        (["--registry", "east,west"], {}, ("east", "west")),
        (["--registry", "east", "--actuators", "west=127.0.0.1:1"], {"west": "127.0.0.1:1"}, ("east", "west")),
        (["--registry", "local", "--actuators", ""], {}, ("local",)),
        (["--registry", ""], {"local": "127.0.0.1:7004"}, ("local",)),
    ],
    ids=["neither", "a registry alone", "both", "a registry and no actuator", "an empty registry"],
)
def test_the_default_actuator_is_for_who_names_no_cluster(flags, actuators, clusters) -> None:
    settings = load_settings(GatewaySettings, flags, {})
    assert (settings.actuators, settings.clusters) == (actuators, clusters)


def test_a_registry_in_the_environment_or_the_file_is_followed_alone_too(tmp_path: Path) -> None:
    assert load_settings(GatewaySettings, [], {"TRIMTAB_REGISTRY": "east"}).clusters == ("east",)
    path = tmp_path / "gateway.yaml"
    path.write_text("registry: [east]\n")
    assert load_settings(GatewaySettings, ["--config", str(path)], {}).actuators == {}
    path.write_text("registry: [east]\nactuators: {west: 127.0.0.1:1}\n")
    assert load_settings(GatewaySettings, ["--config", str(path)], {}).clusters == ("east", "west")
    with pytest.raises(SettingsError, match="actuators or registry has to name a cluster"):
        load_settings(GatewaySettings, ["--actuators", ""], {})


async def asked(gateway) -> tuple[int, str]:
    async with gateway.http.get(gateway.url + "/readyz") as answer:
        return answer.status, await answer.text()


async def until_ready(gateway) -> str:
    """What it says once it is."""
    async with asyncio.timeout(30):
        while True:
            status, said = await asked(gateway)
            if status == 200:
                return said


@pytest.fixture
async def writer(own_store: EmbeddedStore) -> AsyncIterator[Writer]:
    store = await Store.connect(own_store.url)
    yield Writer(store)
    await store.close()


async def test_with_a_registry_alone_it_is_ready_once_the_store_holds_a_set(
    gateway, own_store: EmbeddedStore, writer: Writer, wait_until
) -> None:
    await gateway.start(registry=["local"], store_url=own_store.url, actuators={})
    status, said = await asked(gateway)
    assert (status, said.startswith("local: no endpoint set yet (registry: ")) == (503, True)
    await writer.reign()
    await writer.write(7, also="asleep")
    assert await until_ready(gateway) == "local: the endpoint set of revision 7\n"
    await writer.lease.release()
    own_store.kill()
    await wait_until(lambda: gauge(gateway.context.registry, "trimtab_gateway_endpoints_stale") == 1.0)
    status, said = await asked(gateway)
    assert (status, "which is stale (registry: " in said) == (200, True), "it is routed by all the same"


async def test_with_an_actuator_it_is_ready_once_its_set_names_a_service(gateway) -> None:
    a = await gateway.server("a")
    await gateway.start()
    assert (await asked(gateway))[0] == 503
    gateway.actuator.publish(1, {})
    await gateway.actuator.wait_acknowledged(1)
    status, said = await asked(gateway)
    assert (status, "names no service" in said) == (503, True)
    await gateway.publish(2, {"chat": [("a", a.address, ROUTABLE)]})
    assert await asked(gateway) == (200, "local: the endpoint set of revision 2\n")
    await gateway.publish(3, {"chat": []})
    assert await asked(gateway) == (200, "local: the endpoint set of revision 3\n"), "what comes wakes it"
