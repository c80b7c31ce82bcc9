"""Servers on virtual time: the times of their profile, one awake server a GPU, and nothing asleep with work in it."""

from collections.abc import Callable

import pytest

from lab.virtual.servers import ServerState, VirtualServers
from simulator.core.memory import GpuId, OutOfMemory
from simulator.core.requests import EngineRequest, FinishedRequest
from simulator.profiles import packaged_profiles
from trimtab.domain.vocabulary import Role

A100 = packaged_profiles()["a100-8b-tp1"]
TIMES = A100.lifecycle
GPU = GpuId("node-0", 0)


class Bench:
    """One GPU of 40 GiB, the servers on it, and when each thing that was asked for was done."""

    def __init__(self) -> None:
        self.finished: list[FinishedRequest] = []
        self.servers = VirtualServers({GPU: 40.0}, lambda _, finished: self.finished.append(finished))
        self.done_s: list[float] = []

    def start(self, name: str) -> OutOfMemory | None:
        return self.servers.start(name, service="s", role=Role.COLOCATED, profile=A100, gpus=(GPU,), done=self.done)

    def done(self) -> None:
        self.done_s.append(self.servers.clock.now_s)

    def submit(self, name: str, tokens: int) -> None:
        clock = self.servers.clock
        clock.submit(self.servers.by_name[name].index, EngineRequest("1", 10, tokens), clock.now_s)

    def until(self, at_s: float) -> None:
        self.servers.clock.run_before(at_s)

    def state(self, name: str) -> ServerState:
        return self.servers.by_name[name].state


def test_a_server_starts_sleeps_and_wakes_in_the_times_of_its_profile_and_its_first_sleep_is_the_slow_one() -> None:
    bench = Bench()
    seen = []

    def then(at_s: float, act: Callable[[], object]) -> None:
        bench.until(at_s)
        act()
        seen.append(bench.state("a"))

    then(0.0, lambda: bench.start("a"))
    then(50.0, lambda: bench.servers.sleep("a", bench.done))
    then(100.0, lambda: bench.servers.wake("a", bench.done))
    then(150.0, lambda: bench.servers.sleep("a", bench.done))
    bench.until(200.0)
    assert seen == [ServerState.STARTING, ServerState.FALLING_ASLEEP, ServerState.WAKING, ServerState.FALLING_ASLEEP]
    assert bench.state("a") is ServerState.SLEEPING
    expected = [TIMES.start_up_s, 50 + TIMES.first_sleep_s, 100 + TIMES.wake_s, 150 + TIMES.sleep_s]
    assert bench.done_s == pytest.approx(expected)
    assert TIMES.first_sleep_s > 2 * TIMES.sleep_s
    # The GPU is the server's from its start to its first sleep, and from its wake to its second.
    assert bench.servers.gpu_hours() == pytest.approx((expected[1] + expected[3] - 100) / 3600)


def test_sleep_is_refused_with_the_number_of_requests_that_run() -> None:
    bench = Bench()
    bench.start("a")
    bench.until(50.0)
    bench.submit("a", 100)
    assert bench.servers.sleep("a", bench.done) == 1
    with pytest.raises(ValueError, match="a has 1 requests in flight"):
        bench.servers.remove("a")
    assert bench.state("a") is ServerState.AWAKE
    bench.until(60.0)
    assert [one.generated_tokens for one in bench.finished] == [100]
    assert bench.servers.sleep("a", bench.done) == 0


def test_a_sleeper_keeps_memory_and_only_one_server_is_awake_on_a_gpu() -> None:
    bench = Bench()
    bench.start("a")
    assert isinstance(bench.start("b"), OutOfMemory)
    assert list(bench.servers.by_name) == ["a"]
    bench.until(50.0)
    bench.servers.sleep("a", bench.done)
    assert isinstance(bench.start("b"), OutOfMemory), "memory is free when it sleeps, not before"
    bench.until(80.0)
    asleep, awake = A100.memory.sleeper_gib, A100.memory.awake_gib
    assert bench.servers.memory.used_gib(GPU) == pytest.approx(asleep)
    assert bench.start("b") is None
    assert bench.servers.memory.used_gib(GPU) == pytest.approx(asleep + awake)
    assert isinstance(bench.servers.wake("a", bench.done), OutOfMemory)
    bench.until(150.0)
    bench.servers.remove("b")
    assert bench.servers.memory.used_gib(GPU) == pytest.approx(asleep)
    assert bench.servers.wake("a", bench.done) is None


def test_a_server_that_is_removed_while_it_starts_never_comes_up() -> None:
    bench = Bench()
    bench.start("a")
    bench.until(10.0)
    bench.servers.remove("a")
    bench.until(100.0)
    assert bench.done_s == []
    assert bench.servers.by_name == {}
    assert bench.servers.gpu_hours() == pytest.approx(10 / 3600)
