"""A fleet whose replicas start, sleep and wake, with the times and the memory of their profiles.

A replica that starts or wakes claims the memory of an awake one on its GPUs and is refused when that is not there; one
that sleeps keeps `sleeper_gib`. A release hides the replica, lets it drain until a deadline, ends what still runs then,
and puts it to sleep. Limits: sleep level 1; start-up reads nothing that others could be slowed by.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from simulator.core.jumping import JumpingEngine
from simulator.core.memory import GpuId, GpuMemory, OutOfMemory
from simulator.core.profile import Profile
from simulator.core.requests import FinishedRequest
from simulator.offline.fleet import ColocatedFleet


class LifeCycle(enum.StrEnum):
    """Where a replica stands."""

    STARTING = "starting"
    ACTIVE = "active"
    DRAINING = "draining"
    FALLING_ASLEEP = "falling-asleep"
    SLEEPING = "sleeping"
    REACTIVATING = "reactivating"


@dataclasses.dataclass(slots=True)
class LivingReplica:
    """One replica and what it is doing."""

    name: str
    profile: Profile
    gpus: tuple[GpuId, ...]
    state: LifeCycle
    index: int
    slept_before: bool = False
    release_number: int = 0
    changes: list[tuple[float, LifeCycle]] = dataclasses.field(default_factory=list)
    """Every state with the time it began."""


class LivingFleet(ColocatedFleet):
    """Replicas of one service that come and go; only active ones get requests."""

    def __init__(self, gpu_memory_gib: Mapping[GpuId, float]) -> None:
        super().__init__()
        self.memory = GpuMemory(gpu_memory_gib)
        self.replicas: list[LivingReplica] = []
        """In order of their starts; a replica's place here is its index."""

    def add(self, engine: JumpingEngine) -> int:
        """Refused: a replica of this fleet has a profile and GPUs, see `start`."""
        raise ValueError("replicas of this fleet are started, not added")

    def start(self, name: str, profile: Profile, gpus: tuple[GpuId, ...], now_s: float) -> LivingReplica | OutOfMemory:
        """Begin to load a replica; it serves after the profile's start-up time. Refused when memory is short."""
        short = self.memory.set_claim(name, gpus, profile.memory.awake_gib)
        if short is not None:
            return short
        self.clock.run_before(now_s)
        engine = JumpingEngine(profile.engine_limits(), profile.iteration_model())
        replica = LivingReplica(name, profile, gpus, LifeCycle.STARTING, self.clock.add(engine))
        self.replicas.append(replica)
        self._enter(replica, LifeCycle.STARTING, now_s)
        self.clock.call_at(now_s + profile.lifecycle.start_up_s, lambda at_s: self._activate(replica, at_s))
        return replica

    def release(self, replica: LivingReplica, now_s: float, *, drain_timeout_s: float) -> None:
        """Hide an active replica, drain it and put it to sleep; ValueError when it is not active."""
        self._expect(replica, LifeCycle.ACTIVE)
        self.clock.run_before(now_s)
        self.router.remove(replica.index)
        replica.release_number += 1
        number = replica.release_number
        self._enter(replica, LifeCycle.DRAINING, now_s)
        self.clock.call_at(now_s + drain_timeout_s, lambda at_s: self._drain_over(replica, number, at_s))
        self._sleep_when_idle(replica, now_s)

    def wake(self, replica: LivingReplica, now_s: float) -> OutOfMemory | None:
        """Begin to wake a sleeper; refused when memory is short, ValueError when it does not sleep."""
        self._expect(replica, LifeCycle.SLEEPING)
        short = self.memory.set_claim(replica.name, replica.gpus, replica.profile.memory.awake_gib)
        if short is not None:
            return short
        self.clock.run_before(now_s)
        self._enter(replica, LifeCycle.REACTIVATING, now_s)
        self.clock.call_at(now_s + replica.profile.lifecycle.wake_s, lambda at_s: self._activate(replica, at_s))
        return None

    def _activate(self, replica: LivingReplica, at_s: float) -> None:
        self._enter(replica, LifeCycle.ACTIVE, at_s)
        self.router.add(replica.index, self.clock.engines[replica.index].unfinished)

    def _drain_over(self, replica: LivingReplica, number: int, at_s: float) -> None:
        if replica.state is not LifeCycle.DRAINING or replica.release_number != number:
            return
        engine = self.clock.at(replica.index, at_s)
        for aborted in engine.abort_all(at_s):
            self.records.add(aborted, replica.index)
        self.clock.touched(replica.index)
        self._sleep_when_idle(replica, at_s)

    def _sleep_when_idle(self, replica: LivingReplica, now_s: float) -> None:
        if replica.state is not LifeCycle.DRAINING or self.clock.engines[replica.index].unfinished:
            return
        lifecycle = replica.profile.lifecycle
        seconds = lifecycle.sleep_s if replica.slept_before else max(lifecycle.sleep_s, lifecycle.first_sleep_s)
        replica.slept_before = True
        self._enter(replica, LifeCycle.FALLING_ASLEEP, now_s)
        self.clock.call_at(now_s + seconds, lambda at_s: self._asleep(replica, at_s))

    def _asleep(self, replica: LivingReplica, at_s: float) -> None:
        self.clock.at(replica.index, at_s).reset_cache(at_s)
        self.memory.set_claim(replica.name, replica.gpus, replica.profile.memory.sleeper_gib)
        self._enter(replica, LifeCycle.SLEEPING, at_s)

    def _finished(self, index: int, finished: FinishedRequest) -> None:
        super()._finished(index, finished)
        self._sleep_when_idle(self.replicas[index], finished.finished_s)

    def _enter(self, replica: LivingReplica, state: LifeCycle, at_s: float) -> None:
        replica.state = state
        replica.changes.append((at_s, state))

    def _expect(self, replica: LivingReplica, state: LifeCycle) -> None:
        if replica.state is not state:
            raise ValueError(f"{replica.name} is {replica.state}, not {state}")
