"""Hypothesis drives a cluster through pool states, faults, kills at every step and store outages; the model judges.

Invariants of the design after every half second: 1 (one awake replica on a GPU, never beyond the budget), 2 (floors), 3
(no gateway sends to what it has acknowledged as hidden, none to a sleeper), 4 (nothing sleeps or dies with work in
flight before its deadline), 7 (old tokens are refused, nothing that others compare with falls), 9 (a restart changes
nothing by itself), 10 (every operation has its decision). At the end the faults stop, and everything must come to rest
in the state that was asked for.

``TRIMTAB_TEST_EXAMPLES`` sets the number of runs (60 in the suite, a dozen seconds; some thousands find what is rare).
"""

import os
from copy import deepcopy
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actuator.core.fencing import Refused
from actuator.core.model import ActionKind, Floor, Goal, OperationKind, OperationState, State, Step, StepKind
from tests.unit.actuator.actuator_fleet_model import OLDER_RELEASE, Request, Server
from tests.unit.actuator.actuator_rig import LIMITS, MAX_LOOK_LAG, STEP_S, Rig, spec
from trimtab.domain.vocabulary import LifeCycle, Role

OVERLAY = [spec("a-0", 0), spec("a-1", 1), spec("b-0", 0), spec("b-1", 1), spec("big-0", 0, 1)]
NAMES = [item.replica for item in OVERLAY]
AWAKE_SETS = [["a-0", "a-1"], ["a-0", "b-1"], ["b-0", "a-1"], ["b-0", "b-1"], ["big-0"], ["a-0"], []]
FLOOR = (Floor(service="a", role=Role.COLOCATED, min_replicas=1),)
GATEWAYS = ("g", "h")
FAULTS = ["silent", "wake_refused", "sleep_refused", "no_token", "paused", "slow_sleep_s"]
EXAMPLES = int(os.environ.get("TRIMTAB_TEST_EXAMPLES", "60"))

# A cluster after each bring-up, to begin with a copy of it.
BROUGHT_UP: dict[tuple[tuple[str, ...], int, float, bool], Rig] = {}

gateways = st.sampled_from(GATEWAYS)
names = st.sampled_from(NAMES)
pairs = st.sampled_from([0, 1])
rounds = st.integers(0, 14)
away = st.sampled_from([0.0, 1.0, 8.0])


class ClusterMachine(RuleBasedStateMachine):
    """One pool of two GPUs, three models of which one takes both, two gateways."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(gateways=GATEWAYS)
        self.rig.reconnects_after = (1, 3)
        self.rig.traffic = ("a", "b", "big")
        self.overlay = OVERLAY
        self.revision = 0
        self.token = 1
        self.sleep_level = 1
        self.prewarm = False

    @initialize(
        start=st.sampled_from(AWAKE_SETS[:3]),
        sleep_level=st.sampled_from([1, 2]),
        seconds=st.sampled_from([5.0, 60.0, 60.0]),
        prewarm=st.booleans(),
    )
    def bring_up(self, start: list[str], sleep_level: int, seconds: float, prewarm: bool) -> None:
        self.revision, self.sleep_level, self.prewarm = 1, sleep_level, prewarm
        key = (tuple(start), sleep_level, seconds, prewarm)
        if key not in BROUGHT_UP:
            self.apply_state(start)
            self.rig.run(seconds)
            BROUGHT_UP[key] = self.rig
        self.rig = deepcopy(BROUGHT_UP[key])

    def apply_state(self, awake: list[str], **fields: Any) -> None:
        """Without those that the overlay does not have."""
        names = {item.replica for item in self.overlay}
        awake = [name for name in awake if name in names]
        fields = {"sleep_level": self.sleep_level, "prewarm": self.prewarm, **fields}
        self.rig.apply(self.revision, self.overlay, awake, token=self.token, **fields)

    @property
    def alive(self) -> bool:
        return self.rig.memory is not None and not self.rig.store_away

    def server(self, name: str) -> Server:
        """The server of that name, or one that nobody knows."""
        return self.rig.servers.get(name) or Server(OVERLAY[0], 0.0, 0.0)

    # What is asked

    @precondition(lambda self: self.alive)
    @rule(
        awake=st.sampled_from(AWAKE_SETS),
        floor=st.booleans(),
        drain_s=st.sampled_from([1.0, 5.0]),
        sleep_level=st.sampled_from([None, None, 1, 2]),
    )
    def apply(self, awake: list[str], floor: bool, drain_s: float, sleep_level: int | None) -> None:
        self.sleep_level = sleep_level or self.sleep_level
        floors = FLOOR if floor and "a-0" in awake else ()
        self.revision += 1
        self.apply_state(awake, floors=floors, drain_s=drain_s)

    @precondition(lambda self: self.alive)
    @rule(leaves=st.sampled_from([None, "a-1", "b-0", "big-0"]), awake=st.sampled_from(AWAKE_SETS))
    def overlay_changes(self, leaves: str | None, awake: list[str]) -> None:
        """One replica leaves the pool, or whoever left comes back."""
        self.overlay = [item for item in OVERLAY if item.replica != leaves]
        self.revision += 1
        self.apply_state(awake)

    # One GPU changes hands, as most transitions do, and something goes wrong at one of its steps

    def swap(self, pair: int) -> tuple[str, str]:
        """Who gives and who takes."""
        awake = {name for name in self.rig.memory.pools["p"].awake if name != "big-0"} or {"a-0", "a-1"}
        gives = f"a-{pair}" if f"a-{pair}" in awake else f"b-{pair}"
        takes = f"b-{pair}" if gives.startswith("a") else f"a-{pair}"
        self.revision += 1
        self.apply_state(sorted(awake - {gives} | {takes}))
        return gives, takes

    @precondition(lambda self: self.alive)
    @rule(
        pair=pairs,
        gateway=gateways,
        fault=st.sampled_from(["slow", "stands still", "dies"]),
        rounds=rounds,
        killed=st.booleans(),
    )
    def swap_while_a_gateway_misbehaves(self, pair: int, gateway: str, fault: str, rounds: int, killed: bool) -> None:
        """And the actuator is killed meanwhile, or not."""
        self.rig.later(0.0 if fault == "slow" else rounds * STEP_S, lambda: self.gateway_fails(gateway, fault, 30.0))
        self.rig.step()
        if self.alive:
            self.swap(pair)
        if killed:
            self.rig.later(rounds * STEP_S, lambda: self.die(1, 0.0))
        self.rig.until_idle(20.0)

    @precondition(lambda self: self.alive)
    @rule(
        pair=pairs,
        rounds=rounds,
        actions=st.sampled_from([-1, 0, 1]),
        what=st.sampled_from(["actuator", "store", "both"]),
        away_s=away,
    )
    def swap_while_the_actuator_or_its_store_fails(
        self, pair: int, rounds: int, actions: int, what: str, away_s: float
    ) -> None:
        self.swap(pair)
        if what != "actuator":
            self.rig.later(rounds * STEP_S, lambda: self.lose_store(landed=actions == 0, away_s=away_s))
        if what != "store":
            self.rig.later((rounds + 2) * STEP_S, lambda: self.die(actions, 0.0))
        self.rig.until_idle(20.0)

    @precondition(lambda self: self.alive)
    @rule(
        pair=pairs,
        rounds=rounds,
        donor=st.booleans(),
        fault=st.sampled_from(FAULTS),
        seconds=st.sampled_from([2.0, 8.0]),
    )
    def swap_while_a_server_misbehaves(self, pair: int, rounds: int, donor: bool, fault: str, seconds: float) -> None:
        gives, takes = self.swap(pair)
        name = gives if donor else takes
        self.rig.later(rounds * STEP_S, lambda: self.server_fails(name, fault, seconds))
        self.rig.until_idle(20.0)

    @precondition(lambda self: self.alive)
    @rule(pair=pairs, rounds=rounds, how=st.sampled_from(["lost outcome", "cancel", "back again"]))
    def swap_and_change_ones_mind(self, pair: int, rounds: int, how: str) -> None:
        both = self.swap(pair)
        self.rig.run(rounds * STEP_S)
        if how == "lost outcome":
            for name in both:
                self.rig.lose_outcome(name)
        elif self.alive and how == "cancel":
            self.cancel_newest()
        elif self.alive:
            self.swap(pair)

    @precondition(lambda self: self.alive)
    @rule(pair=pairs, pinned=st.booleans(), gateway=gateways)
    def swap_with_a_long_request(self, pair: int, pinned: bool, gateway: str) -> None:
        for service in ("a", "b"):
            self.rig.send(service, 30.0, pinned=pinned, gateway=gateway)
        self.swap(pair)
        self.rig.until_idle(20.0)

    # A cold replica is warmed up, and something comes in between

    @precondition(lambda self: self.alive and self.prewarm)
    @rule(
        pair=pairs,
        how=st.sampled_from(["restarts when it can", "vanishes", "ends"]),
        rounds=st.integers(0, 40),
        what=st.sampled_from(["actuator", "store", "both", "a newer state", "a floor", "switched off", "cancelled"]),
        actions=st.sampled_from([-1, 0, 1]),
        awake=st.sampled_from(AWAKE_SETS),
    )
    def warm_up_until_somebody_decides_or_dies(
        self, pair: int, how: str, rounds: int, what: str, actions: int, awake: list[str]
    ) -> None:
        both = {"awake": ["a-0", "a-1"], "decision_id": self.cool_down(pair, how)}
        happens = {
            "actuator": lambda: self.die(actions, 1.0),
            "store": lambda: self.lose_store(landed=actions == 0, away_s=1.0),
            "both": lambda: (self.lose_store(landed=actions == 0, away_s=1.0), self.die(actions, 0.0)),
            "a newer state": lambda: self.apply_next(awake=awake),
            "a floor": lambda: self.apply_next(floors=(replace(FLOOR[0], min_replicas=self.of_a()),), **both),
            "switched off": lambda: self.apply_next(prewarm=False, **both),
            "cancelled": self.cancel_newest,
        }
        self.rig.run(rounds * STEP_S)
        happens[what]()
        self.rig.until_idle(40.0)

    @precondition(lambda self: self.alive and self.prewarm)
    @rule(
        pair=pairs,
        how=st.sampled_from(["restarts when it can", "vanishes", "ends"]),
        rounds=st.integers(0, 40),
        whose=st.sampled_from(["a", "b"]),
        fault=st.sampled_from([*FAULTS, "restarts", "restarts when it can", "vanishes", "ends"]),
        seconds=st.sampled_from([2.0, 8.0]),
    )
    def warm_up_while_a_server_misbehaves(
        self, pair: int, how: str, rounds: int, whose: str, fault: str, seconds: float
    ) -> None:
        self.cool_down(pair, how)
        name = f"{whose}-{pair}"
        self.rig.run(rounds * STEP_S)
        (self.server_fails if fault in FAULTS else self.lose)(name, fault, seconds)
        self.rig.until_idle(40.0)

    @precondition(lambda self: self.alive and self.prewarm)
    @rule(
        pair=pairs,
        rounds=st.integers(0, 40),
        gateway=gateways,
        fault=st.sampled_from(["slow", "stands still", "dies", "cut off"]),
    )
    def warm_up_while_a_gateway_misbehaves(self, pair: int, rounds: int, gateway: str, fault: str) -> None:
        self.cool_down(pair, "vanishes")
        self.rig.run(rounds * STEP_S)
        self.gateway_fails(gateway, fault, 30.0)
        self.rig.until_idle(40.0)

    def cool_down(self, pair: int, how: str) -> str:
        """b-0 or b-1 loses its process beside a server that serves, until it could be warmed up; a decision."""
        self.apply_next(awake=["a-0", "a-1"])
        decision_id = f"d-{self.revision}"
        self.rig.until_idle(20.0)
        if self.alive:
            self.lose(f"b-{pair}", how)
        self.rig.run(LIMITS.prewarm_after_s + 1.0)
        return decision_id

    def of_a(self) -> int:
        return sum(item.service == "a" for item in self.overlay)

    def apply_next(self, *, awake: list[str], **fields: Any) -> None:
        """The next state, if somebody is there to take it."""
        if self.alive:
            self.revision += 1
            self.apply_state(awake, **fields)

    def cancel_newest(self) -> None:
        if self.alive:
            self.cancel(newest=True)

    def die(self, actions: int, away_s: float) -> None:
        """Within the next round, after so many of its actions; -1: before its state is stored."""
        self.rig.dies_after = actions
        self.rig.later(1.0 + away_s, self.rig.restart)

    def lose_store(self, *, landed: bool, away_s: float) -> None:
        """At the next write, which lands or not."""
        self.rig.store_breaks = landed
        self.rig.later(1.0 + away_s, self.store_comes_back)

    @precondition(lambda self: self.alive)
    @rule()
    def take_leadership_over(self) -> None:
        self.token += 1
        self.revision += 1
        self.apply_state(["a-0", "a-1"])
        before = self.rig.memory
        with pytest.raises(Refused, match="newer leader"):
            self.rig.apply(self.revision + 1, self.overlay, ["b-1"], token=self.token - 1)
        assert self.rig.memory is before

    @precondition(lambda self: self.alive)
    @rule(newest=st.booleans())
    def cancel(self, newest: bool) -> None:
        unfinished = sorted(o.operation_id for o in self.rig.memory.operations.values() if not o.finished)
        if not unfinished:
            return
        operation = self.rig.operation(unfinished[-1 if newest else 0])
        if operation.kind is OperationKind.OVERLAY:
            with pytest.raises(Refused, match="goes on"):
                self.rig.cancel(operation.operation_id)
        else:
            assert self.rig.cancel(operation.operation_id, "a test") is not None

    @rule(seconds=st.sampled_from([1.0, 5.0, 15.0]))
    def wait(self, seconds: float) -> None:
        self.rig.run(seconds)

    # Load, beside what the gateways send all the time

    @rule(service=st.sampled_from(["a", "b", "big"]), pinned=st.booleans(), gateway=gateways)
    def send_a_long_one(self, service: str, pinned: bool, gateway: str) -> None:
        self.rig.send(service, 30.0, pinned=pinned, gateway=gateway)

    @rule(name=names)
    def send_past_the_gateways(self, name: str) -> None:
        server = self.server(name)
        if server.up(self.rig.now_s) and not server.asleep and server.moving is None:
            server.requests.append(Request(self.rig.now_s + 3.0))

    @rule(name=names, waiting=st.sampled_from([None, 0, 50]), kv_usage=st.sampled_from([None, 0.3, 1.0]))
    def load_changes(self, name: str, waiting: int | None, kv_usage: float | None) -> None:
        self.server(name).waiting, self.server(name).kv_usage = waiting, kv_usage

    # Faults; each ends by itself, after what it did has been met

    @precondition(lambda self: self.rig.memory is not None)
    @rule(actions=st.sampled_from([-1, 0, 1, 2]), away_s=st.sampled_from([0.0, 1.0, 8.0]))
    def actuator_dies_within_a_round(self, actions: int, away_s: float) -> None:
        self.die(actions, away_s)

    @precondition(lambda self: self.alive)
    @rule(landed=st.booleans(), away_s=st.sampled_from([1.0, 8.0]))
    def store_goes_away_at_a_write(self, landed: bool, away_s: float) -> None:
        self.lose_store(landed=landed, away_s=away_s)

    def store_comes_back(self) -> None:
        self.rig.store_breaks, self.rig.store_away = None, False

    @precondition(lambda self: self.alive)
    @rule(crashes=st.booleans())
    def store_comes_back_empty(self, crashes: bool) -> None:
        """Whoever runs on writes everything anew; a new process finds the servers, and is told the state again.

        What is awake is taken for serving, also one that somebody else woke without its weights: no server says that.
        """
        if not crashes or not all(self.can_be_known(server) for server in self.rig.servers.values()):
            self.rig.stored = self.rig.memory
            return
        self.rig.crash()
        self.rig.stored = State()
        with self.rig.undisturbed():
            # A new process comes later than the one before.
            self.rig.step()
            for server in self.rig.servers.values():
                # Awake by the time at which it is found.
                awake = server.moving is ActionKind.WAKE if server.asleep else server.moving is None
                server.proved = server.proved or (awake and server.ready_s <= self.rig.now_s + STEP_S)
            self.rig.restart()
            self.rig.run(1.0)
        self.revision += 1
        self.apply_state(["a-0", "b-1"])

    def can_be_known(self, server: Server) -> bool:
        """Whether the server, or else its pool, tells that its weights are gone, if they are."""
        falls_asleep = server.moving is ActionKind.SLEEP
        level = self.sleep_level if server.placed.service == OLDER_RELEASE else server.level
        keeps = server.has_weights and not (falls_asleep and server.level == 2)
        return keeps or ((server.asleep or falls_asleep) and level == 2)

    @rule(errors=st.integers(1, 4))
    def backend_fails(self, errors: int) -> None:
        """The next creations and deletions."""
        self.rig.fleet.backend_errors = ["the backend is away"] * errors

    @precondition(lambda self: self.rig.doing)
    @rule(data=st.data(), late=st.booleans())
    def outcome_is_late_or_lost(self, data: st.DataObject, late: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.rig.doing)))
        if late:
            self.rig.doing[name].late_s = 5.0
        else:
            self.rig.lose_outcome(name)

    @rule(rounds=st.integers(1, MAX_LOOK_LAG))
    def looks_are_old_for_a_while(self, rounds: int) -> None:
        self.rig.delay_looks(rounds)
        self.rig.later(10.0, lambda: self.rig.delay_looks(0))

    @rule(name=names, how=st.sampled_from(["restarts", "restarts when it can", "vanishes", "ends"]), all_=st.booleans())
    def server_is_lost(self, name: str, how: str, all_: bool) -> None:
        if how == "restarts when it can" and all_:
            self.rig.restart_fleet()
        else:
            self.lose(name, how)

    def lose(self, name: str, how: str, _: float = 0.0) -> None:
        """Its process ends, and starts again or does not."""
        if name not in self.rig.servers:
            return
        if how == "restarts":
            self.rig.reboot(name)
        elif how == "vanishes":
            del self.rig.servers[name]
        elif how == "ends":
            self.rig.servers[name].exited = True
        else:
            self.rig.restart_server(name)

    @rule(name=names, fault=st.sampled_from(FAULTS), seconds=st.sampled_from([2.0, 8.0, 40.0]))
    def server_misbehaves(self, name: str, fault: str, seconds: float) -> None:
        self.server_fails(name, fault, seconds)

    def server_fails(self, name: str, fault: str, seconds: float) -> None:
        server = self.server(name)
        if fault == "slow_sleep_s":
            server.slow_sleep_s = seconds
        elif fault != "paused" or not server.asleep:
            setattr(server, fault, True)
        self.rig.later(seconds, server.heal)

    @rule(name=names, asleep=st.booleans())
    def somebody_moves_a_server(self, name: str, asleep: bool) -> None:
        server = self.server(name)
        if server.up(self.rig.now_s) and name in self.rig.servers and name not in self.rig.doing:
            proved = server.proved
            (self.rig.fleet.sleep_by_hand if asleep else self.rig.fleet.wake_by_hand)(name)
            # Asleep and awake again while no actuator looked: nobody can know.
            server.proved = proved if self.rig.memory is None else server.proved

    @rule(
        gateway=gateways,
        fault=st.sampled_from(["slow", "stands still", "dies", "cut off"]),
        seconds=st.sampled_from([2.0, 30.0]),
    )
    def gateway_misbehaves(self, gateway: str, fault: str, seconds: float) -> None:
        self.gateway_fails(gateway, fault, seconds)

    def gateway_fails(self, gateway: str, fault: str, seconds: float) -> None:
        """Slow: it renews its lease, routes by what it has, and confirms nothing new."""
        found = self.rig.gateways[gateway]
        if fault == "cut off":
            # Shorter than its lease: it goes on by what it knows.
            found.cut_off = 4
            return
        if fault == "slow":
            found.lag = int(seconds / STEP_S)
            return
        if fault == "dies":
            self.rig.later(seconds, lambda: self.rig.replace_gateway(gateway))
            found.die(self.rig.servers)
            return
        found.suspended = True
        self.rig.later(seconds, found.resume)

    # What must hold

    @invariant()
    def half_a_second_passes_and_nothing_is_broken(self) -> None:
        self.rig.step()
        assert self.rig.broken == [], self.rig.broken
        assert self.rig.revisions == sorted(self.rig.revisions), "the endpoint revision fell"
        del self.rig.revisions[:-1]

    @precondition(lambda self: self.alive and self.calm)
    @rule(seconds=st.sampled_from([0.0, 3.0]))
    def a_restart_changes_nothing_by_itself(self, seconds: float) -> None:
        """9: nothing is under way and nothing is out of order."""
        rig = self.rig
        before, operations = rig.life_cycles(), set(rig.memory.operations)
        awake = {name: pool.effective_awake for name, pool in rig.memory.pools.items()}
        rig.crash()
        with rig.undisturbed():
            rig.run(seconds)
            rig.restart()
            rig.run(5.0)
        assert rig.life_cycles() == before
        assert set(rig.memory.operations) == operations
        assert {name: pool.effective_awake for name, pool in rig.memory.pools.items()} == awake

    @property
    def calm(self) -> bool:
        """Every server is what its record says, and nobody works on anything."""
        rig = self.rig
        at_rest = {LifeCycle.ACTIVE: False, LifeCycle.SLEEPING: True}
        return (
            not rig.doing
            and all(operation.finished for operation in rig.memory.operations.values())
            and set(rig.memory.replicas) == {item.replica for item in self.overlay} == set(rig.servers)
            and all(
                rig.servers[r.name].up(rig.now_s)
                and rig.servers[r.name].moving is None
                and not rig.servers[r.name].paused
                and rig.servers[r.name].started_s == r.start_time_s
                and at_rest.get(r.life_cycle) is rig.servers[r.name].asleep
                and (r.life_cycle is LifeCycle.SLEEPING) is (r.name not in rig.memory.pools["p"].effective_awake)
                for r in rig.memory.replicas.values()
            )
        )

    def teardown(self) -> None:
        """The world behaves again: the pool comes to rest in a state that was asked for."""
        rig = self.rig
        rig.forget_later()
        self.store_comes_back()
        rig.dies_after = None
        rig.restart()
        rig.delay_looks(0)
        rig.fleet.backend_errors.clear()
        for place in GATEWAYS:
            if not rig.gateways[place].up:
                rig.replace_gateway(place)
        for gateway in rig.gateways.values():
            gateway.resume()
            gateway.lag = gateway.cut_off = 0
            gateway.requests.clear()
        for server in rig.servers.values():
            server.heal()
            server.requests.clear()
            server.waiting = 0
            server.kv_usage = 0.0
        # What was begun under faults may still fail by them, and is not tried again by itself.
        rig.run(5.0)
        end_s = rig.now_s + 600.0
        while self.under_way() and rig.now_s < end_s:
            rig.step()
        self.revision += 1
        self.overlay = OVERLAY
        self.apply_state(["a-0", "b-1"])
        rest_s, end_s = 0.0, rig.now_s + 900.0
        while rest_s < 10.0 and rig.now_s < end_s:
            rig.run(1.0)
            rest_s = 0.0 if self.unrest() else rest_s + 1.0
        assert rig.broken == [], rig.broken
        assert self.unrest() == [], self.unrest()

    def under_way(self) -> list[str]:
        """Operations that have not ended, but for those that wait until a GPU is free for one more sleeper."""

        def waits_for_room(step: Step) -> bool:
            return step.kind is StepKind.CREATE and step.goal is Goal.ASLEEP and step.state is OperationState.RUNNING

        return [
            f"{operation.operation_id} {operation.steps}"
            for operation in self.rig.memory.operations.values()
            if not operation.finished
            and not (operation.steps and all(step.finished or waits_for_room(step) for step in operation.steps))
        ]

    def unrest(self) -> list[str]:
        """What is not yet as it was asked for."""
        rig = self.rig
        found = self.under_way()
        for name in NAMES:
            replica, server = rig.memory.replicas.get(name), rig.servers.get(name)
            if name in ("a-0", "b-1"):
                found += [] if replica is not None and replica.routable else [f"{name} is not routable: {replica}"]
            elif server is None or server.exited or server.waits:
                # A server comes up awake: it is made again, or comes up, once its GPUs are free.
                found += [f"{name} is {replica}"] if replica is not None and replica.routable else []
            elif replica is None or replica.life_cycle is not LifeCycle.SLEEPING or not server.asleep:
                found.append(f"{name} does not sleep: {replica}")
        return found


ClusterMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    # The suite's runs are always the same ones; a longer search draws new ones each time.
    derandomize="TRIMTAB_TEST_EXAMPLES" not in os.environ,
    stateful_step_count=25,
    deadline=None,
    # Without the explain phase, which traces every line and makes the runs several times as long.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCluster = pytest.mark.timeout(600)(ClusterMachine.TestCase)
