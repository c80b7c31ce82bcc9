"""Tiers, profiles, and the fixtures that every area shares: ports, a store, recordings of real servers.

A test's tier is its folder, and the tier's name is its mark. ``store`` marks by itself each test that uses the shared
store: those run once more on a real Redis in CI.

Hypothesis' profiles, ``quick`` and ``thorough``, are those of tests/support/properties.py.

Each worker of xdist has a store of its own. ``TRIMTAB_TEST_STORE`` chooses it: ``embedded`` (the default),
``redis-server`` (a binary on the PATH), ``docker`` (a container), or ``url``: the one database that
``TRIMTAB_TEST_REDIS_URL`` names, empty or used by these tests before, for a run without xdist's workers.

Recordings of a real vLLM are no part of this repository. ``TRIMTAB_TEST_MATERIAL`` names the folder that holds them,
else it is ``shared`` beside the checkout. Tests that compare with them are skipped where there is none; what the
recordings show in short is written out in tests that always run.
"""

import asyncio
import gzip
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from tests.support.ports import PortBlock, claim_block, claim_stack
from tests.support.properties import register_profiles
from trimtab.store.client import Store
from trimtab.store.embedded import EmbeddedStore

_MARKER = "trimtab-tests:marker"
_TESTS = Path(__file__).parent
_ROOT = _TESTS.parent
_REDIS_IMAGE = os.environ.get("TRIMTAB_TEST_REDIS_IMAGE", "redis:8.0")


register_profiles()

TIERS = ("unit", "services", "stack", "system", "long", "benches", "docker", "vllm")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier, and with ``store`` where it uses the shared store."""
    for item in items:
        tier = item.path.relative_to(_TESTS).parts[0]
        if tier not in TIERS:
            raise pytest.UsageError(f"{item.nodeid}: a test stands in a folder of its tier: {', '.join(TIERS)}")
        item.add_marker(tier)
        if "store_server_url" in getattr(item, "fixturenames", ()):
            item.add_marker("store")


@pytest.fixture(scope="session")
def material() -> Path:
    """A folder with ``vllm/captures`` and ``data``; the test is skipped where there is none."""
    folder = Path(os.environ.get("TRIMTAB_TEST_MATERIAL") or _ROOT.parent / "shared")
    if not (folder / "vllm" / "captures").is_dir():
        pytest.skip(f"no recordings in {folder}; TRIMTAB_TEST_MATERIAL names their folder")
    return folder


@pytest.fixture(scope="session")
def capture(material: Path) -> Callable[[str], bytes]:
    """``capture("metrics-idle-fresh")`` → a page as a real vLLM 0.32 wrote it."""
    return lambda name: gzip.decompress((material / "vllm" / "captures" / f"{name}.prom.gz").read_bytes())


@pytest.fixture(scope="session")
def port_block() -> PortBlock:
    """The ports that this process alone hands out."""
    return claim_block()


@pytest.fixture
def free_port(port_block: PortBlock) -> int:
    """A TCP port on loopback that nobody listens on."""
    return port_block.take()[0]


@pytest.fixture(scope="session")
def free_ports(port_block: PortBlock) -> Callable[[int], list[int]]:
    """``free_ports(n)``: n free ports next to each other."""
    return port_block.take


@contextmanager
def _container_store() -> Iterator[str | None]:
    """A Redis container; None when no engine answers or the image cannot be had."""
    if shutil.which("docker") is None and not Path("/var/run/docker.sock").exists() and "DOCKER_HOST" not in os.environ:
        yield None
        return
    # The container is stopped below; testcontainers' reaper would need an image of its own.
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
    try:
        import docker
        from testcontainers.core.container import DockerContainer

        docker.from_env(timeout=30).ping()
        container = DockerContainer(_REDIS_IMAGE).with_exposed_ports(6379)
        options = ["--bind", "*", "--protected-mode", "no", "--save", "", "--appendonly", "yes"]
        container.with_command(["redis-server", *options])
        container.start()
    except Exception as error:
        print(f"no Redis container: {type(error).__name__}: {error}")
        yield None
        return
    try:
        host, port = container.get_container_host_ip(), int(container.get_exposed_port(6379))
        _await_redis(redis.Redis(host=host, port=port, socket_timeout=2), _REDIS_IMAGE)
        yield f"redis://{host}:{port}/0"
    finally:
        container.stop()


def _await_redis(client: redis.Redis, what: str) -> None:
    give_up = time.monotonic() + 30
    while True:
        try:
            client.ping()
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            assert time.monotonic() < give_up, f"{what} does not answer"
            time.sleep(0.05)
        else:
            client.close()
            return


@contextmanager
def _binary_store(directory: Path, port: int) -> Iterator[str | None]:
    """A ``redis-server`` from the PATH; None when there is none."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        yield None
        return
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", "", "--appendonly", "yes"]
    process = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
    try:
        _await_redis(redis.Redis(port=port, socket_timeout=2), binary)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def _embedded_store(directory: Path, port: int) -> Iterator[str]:
    server = EmbeddedStore(port, directory)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def _claim(url: str) -> None:
    """Refuse a database that holds somebody's data, and one that several workers would empty under each other."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.exit("TRIMTAB_TEST_REDIS_URL is one store for one process: run pytest with -n 0", 2)
    client = redis.Redis.from_url(url, socket_timeout=5)
    if client.dbsize() and not client.exists(_MARKER):
        pytest.exit(f"TRIMTAB_TEST_REDIS_URL names a database that is not empty ({client.dbsize()} keys)", 2)
    client.close()


@pytest.fixture(scope="session")
def store_server_url(tmp_path_factory: pytest.TempPathFactory, port_block: PortBlock) -> Iterator[str]:
    """Where this process's store listens. Tests take ``store_url`` or ``store``, which are empty at their start."""
    given = os.environ.get("TRIMTAB_TEST_REDIS_URL", "")
    wanted = os.environ.get("TRIMTAB_TEST_STORE", "url" if given else "embedded")
    folder = tmp_path_factory.mktemp("store")
    with ExitStack() as stack:
        url: str | None = None
        if wanted == "url" and given:
            _claim(given)
            url = given
        elif wanted == "docker":
            url = stack.enter_context(_container_store())
        elif wanted == "redis-server":
            url = stack.enter_context(_binary_store(folder, port_block.take()[0]))
        elif wanted == "embedded":
            url = stack.enter_context(_embedded_store(folder, port_block.take()[0]))
        if url is None:
            pytest.exit(f"TRIMTAB_TEST_STORE={wanted}: there is no such store here", 2)
        yield url


@pytest.fixture
def store_url(store_server_url: str) -> str:
    """URL of a store that is empty now."""
    client = redis.Redis.from_url(store_server_url, socket_timeout=5)
    client.flushdb()
    client.set(_MARKER, "1")
    client.close()
    return store_server_url


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    """A connected, empty store."""
    connected = await Store.connect(store_url, wait_s=5)
    yield connected
    await connected.close()


@pytest.fixture
def own_store(tmp_path: Path, free_port: int) -> Iterator[EmbeddedStore]:
    """An embedded store of this test alone, started: to be killed, suspended and restarted."""
    server = EmbeddedStore(free_port, tmp_path / "own-store")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def eventually() -> Callable[..., object]:
    """``await eventually(condition, timeout_s=15, what="…")``: wait until ``condition()`` is true, or fail."""

    async def wait(condition: Callable[[], object], timeout_s: float = 30.0, what: str = "the condition") -> object:
        give_up = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            assert time.monotonic() < give_up, f"{what} did not come true within {timeout_s} s"
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture(scope="module")
def module_port_base() -> Iterator[int]:
    """A port base of a whole stack; its ports, and ten from 3,200 further up for servers beside it, are free."""
    base, guard = claim_stack()
    with guard:
        yield base
