"""The life cycle table, holds, endpoint sets and fencing, as tables."""

from dataclasses import replace

import pytest

from actuator.core import holds
from actuator.core.endpoints import endpoint_of, gateway_requests, leased, unaware
from actuator.core.fencing import Refused, check_expiry, check_token, remember_token
from actuator.core.gpu_occupancy import blockers
from actuator.core.lifecycle import TRANSITIONS, EdgeKind, ForbiddenTransition, edge, move, timeout_s
from actuator.core.model import Gateway, Meta, Replica
from actuator.core.world import GpuMemory, World
from tests.unit.actuator.actuator_fleet_model import parts
from tests.unit.actuator.actuator_rig import LIMITS, spec
from trimtab.domain.endpoint import EndpointState
from trimtab.domain.vocabulary import HoldOwner, LifeCycle

S, A, D, Z, R, T, F, U = (
    LifeCycle.STARTING,
    LifeCycle.ACTIVE,
    LifeCycle.DRAINING,
    LifeCycle.SLEEPING,
    LifeCycle.REACTIVATING,
    LifeCycle.TERMINATING,
    LifeCycle.FAILED,
    LifeCycle.UNKNOWN,
)


def replica(life_cycle: LifeCycle = A, name: str = "a-0", *gpus: int, **fields) -> Replica:
    values = {"since_s": 1.0, "cause": "test", "address": "http://a", "ready": life_cycle in (A, D)}
    return Replica(**parts(spec(name, *(gpus or (0,)))), life_cycle=life_cycle, **(values | fields))


FORBIDDEN = [
    (A, R),
    (A, T),
    (Z, A),
    (Z, D),
    (F, A),
    (U, A),
    (S, D),
    (S, R),
    (R, D),
    (T, A),
    (T, S),
    (T, F),
    (F, R),
    (U, R),
    (D, R),
]


@pytest.mark.parametrize(("source", "target"), FORBIDDEN)
def test_what_is_not_in_the_table_cannot_happen(source: LifeCycle, target: LifeCycle) -> None:
    with pytest.raises(ForbiddenTransition, match=f"{source} → {target}"):
        move(replica(source), target, now_s=2.0)


def test_only_a_proof_leads_to_active() -> None:
    assert {source for source, target in TRANSITIONS if target is A} == {S, R, D}


def test_every_state_but_terminating_leads_on_and_says_why() -> None:
    assert {source for source, _ in TRANSITIONS} == set(LifeCycle) - {T}
    assert all(found.cause for found in TRANSITIONS.values())


def test_a_death_is_passive_and_a_wake_is_active() -> None:
    assert [edge(A, F).kind, edge(Z, R).kind, edge(A, Z).kind, edge(D, Z).kind] == [
        EdgeKind.PASSIVE,
        EdgeKind.ACTIVE,
        EdgeKind.PASSIVE,
        EdgeKind.ACTIVE,
    ]


@pytest.mark.parametrize("life_cycle", list(LifeCycle))
def test_transient_states_have_a_time_out(life_cycle: LifeCycle) -> None:
    assert (timeout_s(life_cycle, LIMITS) is not None) == (life_cycle in (S, R, T))


def test_a_move_resets_what_has_to_be_proved_again() -> None:
    draining = replace(move(replica(), D, now_s=2.0), evicting=True)
    asleep = move(draining, Z, now_s=3.0)
    assert (draining.ready, asleep.ready, asleep.evicting, asleep.since_s) == (True, False, False, 3.0)


def test_an_owner_lifts_only_its_own_hold() -> None:
    held = holds.put(replica(), HoldOwner.RELEASE, reason="o-1", now_s=5.0)
    held = holds.put(held, HoldOwner.OPERATOR, reason="benchmark", now_s=6.0)
    held = holds.put(held, HoldOwner.RELEASE, reason="o-2", now_s=7.0)
    assert [(h.owner, h.reason, h.since_s) for h in held.holds] == [
        (HoldOwner.OPERATOR, "benchmark", 6.0),
        (HoldOwner.RELEASE, "o-2", 5.0),
    ]
    lifted = holds.lift(held, HoldOwner.RELEASE)
    assert [h.owner for h in lifted.holds] == [HoldOwner.OPERATOR]
    assert not lifted.routable
    assert holds.lift(lifted, HoldOwner.OPERATOR).routable


SHOWN = {
    "active": (replica(), EndpointState.ROUTABLE),
    "draining": (replica(D), EndpointState.DRAINING),
    "past its deadline": (replica(D, evicting=True), EndpointState.EVICTING),
    "asleep": (replica(Z), None),
    "starting": (replica(S), None),
    "dead": (replica(F), None),
    "silent": (replica(U), None),
    "waking": (replica(R), None),
    "without an address": (replica(A, address=""), None),
    "unproved": (replica(A, ready=False), EndpointState.DRAINING),
    "held by an operator": (
        holds.put(replica(), HoldOwner.OPERATOR, reason="x", now_s=1.0),
        EndpointState.DRAINING,
    ),
    "held at start-up": (holds.put(replica(), HoldOwner.START_UP, reason="x", now_s=1.0), None),
}


@pytest.mark.parametrize("what", sorted(SHOWN))
def test_what_gateways_see(what: str) -> None:
    shown, expected = SHOWN[what]
    endpoint = endpoint_of(shown)
    assert (endpoint.state if endpoint is not None else None) == expected


def test_acknowledgements_count_only_while_the_lease_lasts() -> None:
    gateways = {
        "slow": Gateway(gateway="slow", lease_until_s=10.0, acknowledged_revision=4, in_flight={"a-0": 2}),
        "up-to-date": Gateway(gateway="up-to-date", lease_until_s=10.0, acknowledged_revision=5, pinned={"a-0": 1}),
        "gone": Gateway(gateway="gone", lease_until_s=3.0, acknowledged_revision=1, in_flight={"a-0": 9}),
    }
    hidden = replica(D, hidden_revision=5)
    assert unaware(hidden, leased(gateways, 5.0)) == ["slow"]
    assert gateway_requests("a-0", leased(gateways, 5.0)) == (2, 1)
    assert unaware(hidden, leased(gateways, 2.0)) == ["gone", "slow"]


BLOCKED = {
    "nobody there": ([], None, []),
    "a sleeper": ([replica(Z, "b-0")], 2.0, []),
    "an awake one": ([replica(A, "b-0")], 2.0, ["b-0 is active"]),
    "a silent one": ([replica(U, "b-0")], 2.0, ["b-0 is unknown"]),
    "a dead one that may still run": ([replica(F, "b-0")], 2.0, ["b-0 is failed"]),
    "one on another GPU": ([replica(A, "b-1", 1)], 2.0, []),
    "a sleeper that has not let go": ([replica(Z, "b-0")], 30.0, ["GPU n0/0 still has 30.0 GiB in use"]),
    "two sleepers": ([replica(Z, "b-0"), replica(Z, "c-0")], 4.0, []),
}


@pytest.mark.parametrize("what", sorted(BLOCKED))
def test_a_gpu_is_given_only_when_it_is_measured_free(what: str) -> None:
    others, used_gib, expected = BLOCKED[what]
    records = {other.name: other for other in [*others, replica(Z)]}
    memory = {("n0", 0): GpuMemory(used_gib=used_gib or 0.0, memory_gib=40.0, as_of_s=9.0)}
    world = World(gpu_memory=memory, measures_gpus=True)
    assert blockers(spec("a-0", 0), records, world, LIMITS) == expected


@pytest.mark.parametrize(("nodes", "free"), [(None, False), (frozenset({"n0"}), False), (frozenset({"n1"}), True)])
def test_where_nothing_measures_the_servers_own_word_counts(nodes: frozenset[str] | None, free: bool) -> None:
    records = {other.name: other for other in (replica(Z), replica(Z, "b-0"))}
    world = World(measures_gpus=True, measured_nodes=nodes)
    assert (blockers(spec("a-0", 0), records, world, LIMITS) == []) is free


def test_a_measurement_from_before_the_sleep_proves_nothing() -> None:
    records = {"a-0": replica(Z), "b-0": replica(Z, "b-0", since_s=5.0)}
    memory = {("n0", 0): GpuMemory(used_gib=1.0, memory_gib=40.0, as_of_s=4.9)}
    found = blockers(spec("a-0", 0), records, World(gpu_memory=memory, measures_gpus=True), LIMITS)
    assert found == ["the memory of GPU n0/0 was measured before its last occupant slept"]
    missing = blockers(spec("a-0", 0), records, World(measures_gpus=True), LIMITS)
    assert missing == ["the memory of GPU n0/0 was not measured"]


def test_the_highest_token_of_each_writer_counts() -> None:
    meta = remember_token(remember_token(Meta(), "policy-engine", 7), "prescheduler", 2)
    assert remember_token(meta, "policy-engine", 3).fencing == {"policy-engine": 7, "prescheduler": 2}
    check_token(meta, "prescheduler", 2)
    with pytest.raises(Refused) as caught:
        check_token(meta, "policy-engine", 6)
    assert (caught.value.reason, caught.value.detail) == ("FENCED_OFF", {"highest_token": "7"})


def test_an_expired_write_is_refused_and_one_without_an_end_is_not() -> None:
    check_expiry(None, 1e9)
    check_expiry(10.5, 10.0)
    with pytest.raises(Refused, match=r"expired 2\.0 s ago"):
        check_expiry(8.0, 10.0)
