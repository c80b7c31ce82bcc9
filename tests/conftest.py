"""Fixtures that every area shares: free ports, a store, and recordings of real servers where they are at hand.

The store is the best that can be had, so that the same tests run on a real Redis and on the embedded Valkey. In this
order: ``TRIMTAB_TEST_REDIS_URL`` (a database that is empty, or was used by these tests before), a Redis container
when a Docker engine answers, a ``redis-server`` binary, the embedded store. ``TRIMTAB_TEST_STORE`` = ``url``,
``docker``, ``redis-server`` or ``embedded`` insists on one of them.

Recordings of a real vLLM are no part of this repository. ``TRIMTAB_TEST_MATERIAL`` names the folder that holds them,
else it is ``shared`` beside the checkout. Tests that compare with them are skipped where there is none; what the
recordings show in short is written out in tests that always run.
"""

import asyncio
import gzip
import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, settings

from trimtab.cli.addresses import LocalAddresses
from trimtab.store.client import Store
from trimtab.store.embedded import EmbeddedStore

_MARKER = "trimtab-tests:marker"
_ROOT = Path(__file__).parents[1]
_REDIS_IMAGE = os.environ.get("TRIMTAB_TEST_REDIS_IMAGE", "redis:8.0")


# How long an example takes by the wall clock says how busy the machine is; no property here is about time.
settings.register_profile("trimtab", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trimtab")

_PORTS = range(28_000, 32_700)
_turns = itertools.count(os.getpid())


def _free_port() -> int:
    """Below 32768, where the kernel hands out ports of outgoing connections; the next is none beside the last.

    Each number comes once in a long while. A stride of 37 leaves room for those who take a few ports from a first one.
    """
    ports = (_PORTS[next(_turns) * 37 % len(_PORTS)] for _ in _PORTS)
    return next(port for port in ports if _is_free(port))


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


@pytest.fixture
def free_port() -> int:
    """A TCP port on loopback that nobody listens on."""
    return _free_port()


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], list[int]]:
    """``free_ports(n)``: n different free ports."""

    def take(count: int) -> list[int]:
        found: set[int] = set()
        while len(found) < count:
            found.add(_free_port())
        return sorted(found)

    return take


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

        docker.from_env(timeout=3).ping()
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
    give_up = time.monotonic() + 10
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
def _binary_store(directory: Path) -> Iterator[str | None]:
    """A ``redis-server`` from the PATH; None when there is none."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        yield None
        return
    port = _free_port()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", "", "--appendonly", "yes"]
    process = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
    try:
        _await_redis(redis.Redis(port=port, socket_timeout=2), binary)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def _embedded_store(directory: Path) -> Iterator[str]:
    server = EmbeddedStore(_free_port(), directory)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def _claim(url: str) -> None:
    """Refuse a database that holds somebody's data: the tests empty it."""
    client = redis.Redis.from_url(url, socket_timeout=5)
    if client.dbsize() and not client.exists(_MARKER):
        pytest.exit(f"TRIMTAB_TEST_REDIS_URL names a database that is not empty ({client.dbsize()} keys)", 2)
    client.close()


@pytest.fixture(scope="session")
def store_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the session's store listens. Tests take ``store_url`` or ``store``, which are empty at their start."""
    wanted = os.environ.get("TRIMTAB_TEST_STORE", "")
    given = os.environ.get("TRIMTAB_TEST_REDIS_URL")
    if given and wanted in ("", "url"):
        _claim(given)
        yield given
        return
    if wanted in ("", "docker"):
        with _container_store() as url:
            if url is not None:
                yield url
                return
    if wanted in ("", "redis-server"):
        with _binary_store(tmp_path_factory.mktemp("redis")) as url:
            if url is not None:
                yield url
                return
    if wanted not in ("", "embedded"):
        pytest.exit(f"TRIMTAB_TEST_STORE={wanted}: there is no such store here", 2)
    with _embedded_store(tmp_path_factory.mktemp("valkey")) as url:
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
def own_store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    """An embedded store of this test alone, started: to be killed, suspended and restarted."""
    server = EmbeddedStore(_free_port(), tmp_path / "own-store")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def eventually() -> Callable[..., object]:
    """``await eventually(condition, timeout_s=15, what="…")``: wait until ``condition()`` is true, or fail."""

    async def wait(condition: Callable[[], object], timeout_s: float = 15.0, what: str = "the condition") -> object:
        give_up = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            assert time.monotonic() < give_up, f"{what} did not come true within {timeout_s} s"
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture(scope="module")
def module_port_base() -> int:
    """A port base of a whole stack whose ports, and ten from 3,200 further up for servers beside it, are free.

    All of them lie below 32768, where the kernel starts to hand out ports of outgoing connections.
    """
    first = 14_000 + os.getpid() % 200 * 50
    for base in range(first, first + 2_000, 37):
        if all(_is_free(port) for port in (*_stack_ports(base), *range(base + 3200, base + 3210))):
            return base
    raise AssertionError("no free range of ports")


def _stack_ports(base: int) -> list[int]:
    return list(LocalAddresses(port_base=base).single_ports().values())


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
