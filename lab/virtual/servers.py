"""Simulated vLLM servers on virtual time: they start, sleep, wake and serve, with the times of their profiles.

A server that starts or wakes claims an awake server's memory on its GPUs and is refused where that is not free. Sleep
is refused while requests run, as the actuator requests it only when none do. Limits: sleep level 1; start-ups do not
slow each other down.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping

from lab.virtual.clock import EngineClock, OnFinished
from lab.virtual.gpu_outputs import GPU_POWER
from lab.virtual.recording import EngineRecorder, waiting_shown
from simulator.core.curves import DecodeCurves
from simulator.core.event_engine import EventEngine
from simulator.core.memory import GpuId, GpuMemory, OutOfMemory
from simulator.core.profile import Profile
from simulator.core.timing import BatchWork
from trimtab.domain.vocabulary import Role

J_PER_KWH = 3.6e6


class ServerState(enum.StrEnum):
    """The state of the process; the actuator decides whether gateways may use it."""

    STARTING = "starting"
    AWAKE = "awake"
    FALLING_ASLEEP = "falling-asleep"
    SLEEPING = "sleeping"
    WAKING = "waking"


@dataclasses.dataclass(slots=True)
class VirtualServer:
    """One server. `index` is its engine's on the clock."""

    name: str
    service: str
    role: Role
    profile: Profile
    gpus: tuple[GpuId, ...]
    index: int
    recorder: EngineRecorder
    state: ServerState
    slept_before: bool
    up_since_s: float | None = None
    """Since when it has not been asleep; None while it is."""
    gpu_s: float = 0.0
    """GPU time of stretches that are over."""

    @property
    def blocks(self) -> int:
        """KV blocks of its cache."""
        return self.profile.num_gpu_blocks

    @property
    def awake(self) -> bool:
        """Whether it answers requests."""
        return self.state is ServerState.AWAKE


class VirtualServers:
    """All servers of a run, on one clock."""

    def __init__(self, gpu_memory_gib: Mapping[GpuId, float], on_finished: OnFinished) -> None:
        self.clock = EngineClock(on_finished)
        self.memory = GpuMemory(gpu_memory_gib)
        self.by_name: dict[str, VirtualServer] = {}
        self.by_index: list[VirtualServer] = []
        self._curves: dict[str, DecodeCurves] = {}

    def place(
        self,
        name: str,
        *,
        service: str,
        role: Role,
        profile: Profile,
        gpus: tuple[GpuId, ...],
        awake: bool,
        slept_before: bool = True,
    ) -> VirtualServer:
        """A server that is up already, awake or asleep. Raises ValueError when its memory does not fit."""
        gib = profile.memory.awake_gib if awake else profile.memory.sleeper_gib
        short = self.memory.set_claim(name, gpus, gib)
        if short is not None:
            raise ValueError(f"{name} does not fit: {short}")
        state = ServerState.AWAKE if awake else ServerState.SLEEPING
        return self._add(name, service, role, profile, gpus, state, slept_before)

    def start(
        self,
        name: str,
        *,
        service: str,
        role: Role,
        profile: Profile,
        gpus: tuple[GpuId, ...],
        done: Callable[[], None],
    ) -> OutOfMemory | None:
        """Begin to load a server; it is awake after the profile's start-up time, when `done` is called."""
        short = self.memory.set_claim(name, gpus, profile.memory.awake_gib)
        if short is not None:
            return short
        server = self._add(name, service, role, profile, gpus, ServerState.STARTING, False)
        self._after(profile.lifecycle.start_up_s, server, ServerState.AWAKE, done)
        return None

    def sleep(self, name: str, done: Callable[[], None]) -> int:
        """Begin to fall asleep; `done` is called when it sleeps. With requests in it nothing happens: their number."""
        server = self.by_name[name]
        unfinished = self.clock.at(server.index, self.clock.now_s).unfinished
        if unfinished:
            return unfinished
        lifecycle = server.profile.lifecycle
        seconds = lifecycle.sleep_s if server.slept_before else max(lifecycle.sleep_s, lifecycle.first_sleep_s)
        server.slept_before = True
        server.state = ServerState.FALLING_ASLEEP
        self._after(seconds, server, ServerState.SLEEPING, done)
        return 0

    def wake(self, name: str, done: Callable[[], None]) -> OutOfMemory | None:
        """Begin to wake a sleeper; `done` is called when it is awake."""
        server = self.by_name[name]
        short = self.memory.set_claim(name, server.gpus, server.profile.memory.awake_gib)
        if short is not None:
            return short
        server.state = ServerState.WAKING
        server.up_since_s = self.clock.now_s
        self._after(server.profile.lifecycle.wake_s, server, ServerState.AWAKE, done)
        return None

    def remove(self, name: str) -> None:
        """End a server; raises ValueError while it has requests."""
        server = self.by_name[name]
        engine = self.clock.at(server.index, self.clock.now_s)
        if engine.unfinished:
            raise ValueError(f"{name} has {engine.unfinished} requests in flight")
        self._end_gpu_time(server)
        self.memory.release(name)
        del self.by_name[name]

    def in_flight(self, name: str) -> int:
        """Requests in the engine, in any state."""
        server = self.by_name[name]
        return self.clock.at(server.index, self.clock.now_s).unfinished

    def load(self, name: str) -> tuple[int, float]:
        """What its page shows now of requests that wait, and the share of its KV cache in use."""
        server = self.by_name[name]
        engine = self.clock.at(server.index, self.clock.now_s)
        gauges = engine.observe(self.clock.now_s)
        return waiting_shown(engine, gauges), gauges.kv_usage_ratio

    def canary_s(self, name: str) -> float:
        """How long one token of an idle engine takes."""
        engine = self.clock.engines[self.by_name[name].index]
        return engine.timing.iteration_s(BatchWork(8, 0, 0, 32.0))

    def gpu_hours(self) -> float:
        """GPU time of servers that were not asleep, up to now."""
        return sum(self._gpu_s(server) for server in self.by_index) / 3600

    def busy_gpu_hours(self) -> float:
        """GPU time in which some kernel ran, what `nvidia-smi` calls utilisation, up to now."""
        busy_s = 0.0
        for server in self.by_index:
            engine = self.clock.at(server.index, self.clock.now_s)
            busy_s += engine.observe(self.clock.now_s).busy_s * len(server.gpus)
        return busy_s / 3600

    def energy_kwh(self, duration_s: float) -> float | None:
        """Idle power of every GPU for `duration_s`, and the rest of its power for the time its arithmetic took.

        For a pool, whose GPUs stay its own while servers sleep. None where the power of a GPU type is not known.
        """
        gpu_types = {gpu: server.profile.gpu_type for server in self.by_index for gpu in server.gpus}
        arithmetic_j = self._arithmetic_j()
        if arithmetic_j is None:
            return None
        return (arithmetic_j + sum(GPU_POWER[name].idle_w * duration_s for name in gpu_types.values())) / J_PER_KWH

    def held_energy_kwh(self) -> float | None:
        """The same up to now, with idle power for the time that each GPU had a server that was not asleep.

        For servers that come and go, whose GPUs others may have in between. One that is starting idles. None where the
        power of a GPU type is not known.
        """
        arithmetic_j = self._arithmetic_j()
        if arithmetic_j is None:
            return None
        idle_j = sum(GPU_POWER[one.profile.gpu_type].idle_w * self._gpu_s(one) for one in self.by_index)
        return (arithmetic_j + idle_j) / J_PER_KWH

    def _arithmetic_j(self) -> float | None:
        """What arithmetic took beyond idle power, of servers that are gone too."""
        joules = 0.0
        for server in self.by_index:
            power = GPU_POWER.get(server.profile.gpu_type)
            if power is None:
                return None
            engine = self.clock.at(server.index, self.clock.now_s)
            active_s = engine.observe(self.clock.now_s).computed_tokens * engine.timing.token_s
            joules += active_s * (power.peak_w - power.idle_w) * len(server.gpus)
        return joules

    def _gpu_s(self, server: VirtualServer) -> float:
        """GPU time of a server that it was not asleep, up to now."""
        if server.up_since_s is None:
            return server.gpu_s
        return server.gpu_s + (self.clock.now_s - server.up_since_s) * len(server.gpus)

    def _add(
        self,
        name: str,
        service: str,
        role: Role,
        profile: Profile,
        gpus: tuple[GpuId, ...],
        state: ServerState,
        slept_before: bool,
    ) -> VirtualServer:
        timing, limits = profile.iteration_model(), profile.engine_limits()
        curves = self._curves.setdefault(profile.name, DecodeCurves(timing, limits.kv_capacity_tokens))
        engine = EventEngine(limits, timing, curves)
        index = self.clock.add(engine)
        recorder = EngineRecorder(engine, start_time_s=self.clock.now_s)
        up_since_s = None if state is ServerState.SLEEPING else self.clock.now_s
        server = VirtualServer(name, service, role, profile, gpus, index, recorder, state, slept_before, up_since_s)
        self.by_name[name] = server
        self.by_index.append(server)
        return server

    def _after(self, seconds: float, server: VirtualServer, state: ServerState, done: Callable[[], None]) -> None:
        def arrive(at_s: float) -> None:
            if self.by_name.get(server.name) is not server:
                return
            server.state = state
            if state is ServerState.SLEEPING:
                self._end_gpu_time(server)
                self.clock.at(server.index, at_s).reset_cache(at_s)
                self.memory.set_claim(server.name, server.gpus, server.profile.memory.sleeper_gib)
            done()

        self.clock.call_at(self.clock.now_s + seconds, arrive)

    def _end_gpu_time(self, server: VirtualServer) -> None:
        server.gpu_s = self._gpu_s(server)
        server.up_since_s = None
