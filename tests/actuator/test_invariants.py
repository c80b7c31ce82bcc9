"""Hypothesis drives a cluster through pool states, faults, kills and store outages; the rig judges every action.

Invariants of the design: 1 (one awake replica on a GPU, as far as could be seen), 2 (floors), 3 (no gateway routes to a
replica that sleeps), 4 (nothing sleeps or dies with work in flight before its deadline), 7 (old tokens are refused),
9 (a restart changes nothing by itself), 10 (every operation has its decision). And at the end: once the world behaves,
everything converges.
"""

import hypothesis.strategies as st
import pytest
from actuator_rig import Rig, spec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actuator.core.fencing import Refused
from actuator.core.model import Floor
from trimtab.words import LifeCycle, Role

OVERLAY = [spec("a-0", 0), spec("a-1", 1), spec("b-0", 0), spec("b-1", 1), spec("big-0", 0, 1)]
NAMES = [item.replica for item in OVERLAY]
AWAKE_SETS = [["a-0", "a-1"], ["a-0", "b-1"], ["b-0", "a-1"], ["b-0", "b-1"], ["big-0"], ["a-0"], []]
FLOOR = (Floor(service="a", role=Role.COLOCATED, min_replicas=1),)


class ClusterMachine(RuleBasedStateMachine):
    """One pool of two GPUs, three models, one gateway."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.revision = 0
        self.token = 1

    @initialize(start=st.sampled_from(AWAKE_SETS[:3]))
    def bring_up(self, start: list[str]) -> None:
        self.revision = 1
        self.rig.apply(1, OVERLAY, start)
        self.rig.run(20.0)

    @property
    def alive(self) -> bool:
        return self.rig.memory is not None and not self.rig.store_away

    @precondition(lambda self: self.alive)
    @rule(awake=st.sampled_from(AWAKE_SETS), floor=st.booleans())
    def apply(self, awake: list[str], floor: bool) -> None:
        floors = FLOOR if floor and any(name.startswith("a") for name in awake) else ()
        self.revision += 1
        self.rig.apply(self.revision, OVERLAY, awake, token=self.token, floors=floors)

    @precondition(lambda self: self.alive)
    @rule()
    def take_leadership_over(self) -> None:
        self.token += 1
        self.revision += 1
        self.rig.apply(self.revision, OVERLAY, ["a-0", "a-1"], token=self.token)
        with pytest.raises(Refused, match="newer leader"):
            self.rig.apply(self.revision + 1, OVERLAY, ["b-0"], token=self.token - 1)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 5.0, 15.0]))
    def wait(self, seconds: float) -> None:
        self.rig.run(seconds)

    @rule(service=st.sampled_from(["a", "b", "big"]), seconds=st.sampled_from([1.0, 4.0, 30.0]), pinned=st.booleans())
    def send(self, service: str, seconds: float, pinned: bool) -> None:
        self.rig.send(service, seconds, pinned=pinned)

    @rule()
    def kill_actuator(self) -> None:
        self.rig.crash()

    @rule()
    def start_actuator(self) -> None:
        self.rig.restart()

    @rule(away=st.booleans())
    def store(self, away: bool) -> None:
        self.rig.store_away = away

    @rule(name=st.sampled_from(NAMES))
    def reboot_server(self, name: str) -> None:
        if name in self.rig.servers:
            self.rig.reboot(name)

    @rule(name=st.sampled_from(NAMES))
    def restart_server(self, name: str) -> None:
        if name in self.rig.servers:
            self.rig.restart_server(name)

    @rule()
    def restart_fleet(self) -> None:
        self.rig.restart_fleet()

    @rule(name=st.sampled_from(NAMES), fault=st.sampled_from(["exited", "silent", "wake_refused", "no_token"]))
    def break_server(self, name: str, fault: str) -> None:
        if name in self.rig.servers:
            setattr(self.rig.servers[name], fault, True)

    @rule(name=st.sampled_from(NAMES))
    def heal_server(self, name: str) -> None:
        server = self.rig.servers.get(name)
        if server is not None:
            server.silent = server.wake_refused = server.no_token = False

    @rule(up=st.booleans(), lag=st.integers(0, 6))
    def gateway(self, up: bool, lag: int) -> None:
        if not up:
            # It dies, and its requests with it.
            self.rig.gateway_requests.clear()
            for server in self.rig.servers.values():
                server.requests.clear()
            self.rig.gateway_set = (0, ())
        self.rig.gateway_up, self.rig.gateway_lag = up, lag

    @invariant()
    def nothing_is_broken(self) -> None:
        assert self.rig.broken == []

    @invariant()
    def the_endpoint_revision_never_falls(self) -> None:
        assert self.rig.revisions == sorted(self.rig.revisions)
        del self.rig.revisions[:-1]

    @invariant()
    def records_give_no_gpu_to_two_routable_replicas(self) -> None:
        if self.rig.memory is None:
            return
        users: dict[object, str] = {}
        for replica in self.rig.memory.replicas.values():
            for gpu in replica.spec.gpus if replica.routable else ():
                assert gpu not in users, f"{replica.name} and {users[gpu]} are both shown on {gpu}"
                users[gpu] = replica.name

    @invariant()
    def every_operation_has_its_decision(self) -> None:
        if self.rig.memory is not None:
            assert all(operation.decision_id for operation in self.rig.memory.operations.values())

    def teardown(self) -> None:
        """The world behaves again: the pool comes to rest in a state that was asked for."""
        rig = self.rig
        rig.store_away = False
        rig.restart()
        rig.gateway_up, rig.gateway_lag = True, 0
        for server in rig.servers.values():
            server.silent = server.wake_refused = server.no_token = False
            server.requests.clear()
        rig.run(420.0)
        assert rig.memory is not None
        self.revision += 1
        rig.apply(self.revision, OVERLAY, ["a-0", "b-1"], token=self.token)
        rig.run(240.0)
        assert rig.broken == []
        left = {name: r.life_cycle for name, r in rig.memory.replicas.items() if name not in ("a-0", "b-1")}
        dead = {name for name in left if rig.servers[name].exited}
        waiting = {name for name in left if rig.servers[name].waits}
        # A server comes up awake: a dead sleeper is made again once its GPU is free, a restarted one waits for that.
        expected = {
            name: LifeCycle.FAILED if name in dead else LifeCycle.STARTING if name in waiting else LifeCycle.SLEEPING
            for name in left
        }
        assert left == expected, rig.memory.operations
        assert sorted(name for name, replica in rig.memory.replicas.items() if replica.routable) == [
            "a-0",
            "b-1",
        ], rig.memory.operations


ClusterMachine.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCluster = ClusterMachine.TestCase
