"""The routing core: tables for its rules, Hypothesis for what must never happen."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.routing import ROLES, Failure, InFlight, Router, RoutingLimits, Stage, TicketState
from trimtab.domain.endpoint import Endpoint, EndpointState
from trimtab.domain.vocabulary import Role

ROUTABLE, DRAINING, EVICTING = EndpointState.ROUTABLE, EndpointState.DRAINING, EndpointState.EVICTING


def endpoint(replica: str, *, service: str = "chat", role: Role = Role.COLOCATED, cluster: str = "local", **more):
    return Endpoint(
        cluster=cluster,
        replica=replica,
        service=service,
        model=f"{service}-model",
        address=f"http://{replica}",
        role=role,
        **more,
    )


def router_with(*endpoints: Endpoint, **limits) -> Router:
    router = Router(RoutingLimits(**limits))
    for cluster in sorted({e.cluster for e in endpoints}):
        router.apply(cluster, 1, [], [e for e in endpoints if e.cluster == cluster])
    return router


def front(router: Router, service: str = "chat", now_s: float = 0.0):
    return router.submit(service, Stage.FRONT, now_s=now_s)


def test_least_in_flight_wins_and_ties_go_to_the_smallest_name():
    router = router_with(endpoint("b"), endpoint("a"))
    chosen = [front(router).target.replica for _ in range(4)]
    assert chosen == ["a", "b", "a", "b"]


def test_finished_request_frees_its_place_once():
    router = router_with(endpoint("a"), endpoint("b"))
    first = front(router)
    front(router)
    router.finish(first)
    router.finish(first)
    assert (router.in_flight(("local", "a")), router.in_flight(("local", "b"))) == (0, 1)
    assert front(router).target.replica == "a"


def test_names_resolve_to_services_first_then_models():
    router = router_with(endpoint("a"), endpoint("b", service="batch"))
    router.apply(
        "local", 2, ["empty"], [endpoint("a"), dataclasses.replace(endpoint("b", service="batch"), model="chat")]
    )
    assert [router.resolve(name) for name in ("chat", "batch", "empty", "chat-model", "nobody")] == [
        "chat",
        "batch",
        "empty",
        "chat",
        None,
    ]


def test_model_of_several_services_goes_to_the_first_by_name():
    shared = [dataclasses.replace(endpoint("x", service=name), replica=name, model="m") for name in ("b", "a", "c")]
    assert router_with(*shared).resolve("m") == "a"


@pytest.mark.parametrize("state", [DRAINING, EVICTING])
def test_hidden_replicas_take_nothing_new(state):
    router = router_with(endpoint("a", state=state))
    assert front(router).state is TicketState.HELD


def test_held_requests_go_out_in_order_when_a_replica_comes():
    router = router_with(endpoint("a", state=DRAINING))
    tickets = [front(router, now_s=float(i)) for i in range(3)]
    assert router.held("chat") == 3
    router.apply("local", 2, [], [endpoint("a")])
    assert router.dispatch(now_s=5.0) == tickets
    assert all(ticket.target.replica == "a" for ticket in tickets)
    assert router.held("chat") == 0


def test_hold_queue_is_bounded_in_number_and_time():
    router = router_with(endpoint("a", state=DRAINING), max_held_per_service=2, max_hold_s=10)
    first, second, third = front(router), front(router, now_s=4), front(router)
    assert third.state is TicketState.REFUSED
    assert router.dispatch(now_s=9.9) == []
    assert router.dispatch(now_s=10.0) == [first]
    assert (first.state, second.state, router.held("chat")) == (TicketState.EXPIRED, TicketState.HELD, 1)


def test_requests_under_way_wait_before_new_ones_and_are_never_refused():
    router = router_with(endpoint("a", state=DRAINING), max_held_per_service=1)
    new = front(router)
    again = router.submit("chat", Stage.FRONT, now_s=0.0, again=True)
    assert front(router).state is TicketState.REFUSED
    router.apply("local", 2, [], [endpoint("a")])
    assert router.dispatch(now_s=0.0) == [again, new]


def test_given_up_wait_leaves_the_queue():
    router = router_with(endpoint("a", state=DRAINING), max_held_per_service=1)
    router.finish(front(router))
    assert router.held("chat") == 0
    assert front(router).state is TicketState.HELD


def test_disaggregated_service_needs_both_roles_in_one_cluster():
    prefill = endpoint("p", role=Role.PREFILL, cluster="east")
    far = endpoint("d", role=Role.DECODE, cluster="west")
    assert front(router_with(prefill, far)).state is TicketState.HELD
    near = endpoint("d", role=Role.DECODE, cluster="east")
    router = router_with(prefill, near, far)
    ticket = front(router)
    assert ticket.target.key == ("east", "p")
    decode = [router.submit("chat", Stage.DECODE, now_s=0, cluster="east").target.key for _ in range(2)]
    assert decode == [("east", "d"), ("east", "d")]


def test_decode_stage_waits_even_when_the_queue_is_full():
    router = router_with(endpoint("d", role=Role.DECODE, state=DRAINING), max_held_per_service=0)
    assert router.submit("chat", Stage.DECODE, now_s=0, cluster="local").state is TicketState.HELD


def test_unreachable_replica_is_not_taken_until_its_moment_is_over():
    router = router_with(endpoint("a"), avoid_s=1.0)
    router.failed(("local", "a"), Failure.UNREACHABLE, now_s=10.0)
    ticket = front(router, now_s=10.5)
    assert ticket.state is TicketState.HELD
    assert router.dispatch(now_s=11.0) == [ticket]
    assert ticket.state is TicketState.ASSIGNED


def test_erring_replica_is_the_last_choice_but_one():
    router = router_with(endpoint("a"), endpoint("b"))
    router.failed(("local", "a"), Failure.ERROR, now_s=0.0)
    assert [front(router, now_s=0.1).target.replica for _ in range(3)] == ["b", "b", "b"]
    router.apply("local", 2, [], [endpoint("a")])
    assert front(router, now_s=0.2).target.replica == "a"


A, B = ("local", "a"), ("local", "b")


@pytest.mark.parametrize(
    ("avoided", "failed", "expected"),
    [
        ({}, {A}, "b"),
        ({B: Failure.ERROR}, {A}, "b"),
        # No second one can be taken: the first gets another chance, when the moment in which it is avoided is over.
        ({B: Failure.UNREACHABLE}, {A}, "a"),
        ({A: Failure.ERROR, B: Failure.UNREACHABLE}, {A}, None),
        ({A: Failure.UNREACHABLE, B: Failure.UNREACHABLE}, {A}, None),
        ({}, {A, B}, "a"),
    ],
)
def test_request_sent_again_goes_to_a_replica_that_has_not_failed_it(avoided, failed, expected):
    router = router_with(endpoint("a"), endpoint("b"))
    for ticket in [front(router) for _ in range(4)]:
        if ticket.target.replica == "a":
            router.finish(ticket)
    for key, failure in avoided.items():
        router.failed(key, failure, now_s=0.0)
    ticket = router.submit("chat", Stage.FRONT, now_s=0.1, again=True, failed=failed)
    assert (ticket.endpoint and ticket.endpoint.replica) == expected
    assert (ticket.state is TicketState.HELD) == (expected is None)


def test_request_waits_before_it_goes_back_to_the_only_replica_which_failed_it_with_an_error():
    router = router_with(endpoint("a"), avoid_s=1.0)
    router.failed(A, Failure.ERROR, now_s=0.0)
    new = front(router, now_s=0.1)
    again = router.submit("chat", Stage.FRONT, now_s=0.1, again=True, failed={A})
    assert (new.state, again.state) == (TicketState.ASSIGNED, TicketState.HELD)
    assert router.dispatch(now_s=0.9) == []
    assert router.dispatch(now_s=1.0) == [again]
    assert again.target.replica == "a"


def test_failure_is_remembered_by_the_request_after_the_replica_has_answered_others():
    router = router_with(endpoint("a"), endpoint("b"))
    router.failed(A, Failure.ERROR, now_s=0.0)
    other = front(router, now_s=1.0)
    assert other.target.key == A
    router.answered(other)
    router.finish(other)
    assert router.submit("chat", Stage.FRONT, now_s=1.0, again=True, failed={A}).target.replica == "b"
    assert front(router, now_s=1.0).target.replica == "a"


def test_an_answer_that_was_under_way_before_the_failure_does_not_make_the_replica_good_again():
    """A server that refuses all new requests may well go on with the old ones."""
    router = router_with(endpoint("a"), avoid_s=1.0)
    old = front(router)
    router.failed(A, Failure.ERROR, now_s=0.0)
    router.answered(old)
    again = router.submit("chat", Stage.FRONT, now_s=0.1, again=True, failed={A})
    assert again.state is TicketState.HELD
    new = front(router, now_s=0.2)
    router.answered(new)
    assert router.dispatch(now_s=0.3) == [again]


def test_failed_decode_replica_leads_to_a_cluster_with_another_one():
    pairs = [
        endpoint(name, role=role, cluster=cluster)
        for cluster in ("east", "west")
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
    ]
    assert front(router_with(*pairs)).target.key == ("east", "p")
    again = router_with(*pairs).submit("chat", Stage.FRONT, now_s=0.0, again=True, failed={("east", "d")})
    assert again.target.key == ("west", "p")


@given(
    roles=st.dictionaries(
        st.tuples(st.sampled_from(["east", "west"]), st.sampled_from(["r0", "r1", "r2"])),
        st.sampled_from(sorted(ROLES)),
    ),
    failed=st.sets(st.tuples(st.sampled_from(["east", "west"]), st.sampled_from(["r0", "r1", "r2"]))),
    stage=st.sampled_from(list(Stage)),
)
def test_failed_replicas_might_as_well_be_absent_unless_nothing_else_is_there(roles, failed, stage):
    def chosen(keys, **more):
        router = router_with(*(endpoint(name, role=roles[cluster, name], cluster=cluster) for cluster, name in keys))
        found = router.submit("chat", stage, now_s=0.0, **more).endpoint
        return found and found.key

    without = chosen([key for key in roles if key not in failed])
    assert chosen(roles, failed=failed) == (without or chosen(roles))


def test_repeated_failures_are_avoided_longer_until_an_answer():
    router = router_with(endpoint("a"), avoid_s=1.0, max_avoid_s=4.0)
    waits = []
    now_s = 0.0
    for _ in range(4):
        router.failed(("local", "a"), Failure.UNREACHABLE, now_s=now_s)
        start_s = now_s
        ticket = front(router, now_s=now_s)
        while ticket.state is TicketState.HELD:
            now_s += 0.5
            router.dispatch(now_s=now_s)
        waits.append(now_s - start_s)
    assert waits == [1.0, 2.0, 4.0, 4.0]
    router.answered(ticket)
    router.failed(("local", "a"), Failure.UNREACHABLE, now_s=100.0)
    assert front(router, now_s=101.0).state is TicketState.ASSIGNED


def test_left_behind_names_hidden_replicas_and_pinned_requests():
    router = router_with(endpoint("a"), endpoint("b"), endpoint("c"))
    on_a, on_b, _ = front(router), front(router), front(router)
    on_a.movable = False
    on_b.movable = False
    router.apply("local", 2, [], [endpoint("a", state=EVICTING), endpoint("b"), endpoint("c", state=DRAINING)])
    assert router.left_behind("local") == [InFlight("a", 1, 1), InFlight("b", 1, 1), InFlight("c", 1, 0)]
    assert router.left_behind("elsewhere") == []


def test_vanished_replica_is_left_behind_until_its_requests_end():
    router = router_with(endpoint("a"), endpoint("b"))
    ticket = front(router)
    router.apply("local", 2, [], [endpoint("b")])
    assert router.left_behind("local") == [InFlight("a", 1, 0)]
    router.finish(ticket)
    assert router.left_behind("local") == []


def test_evicted_request_is_pinned_while_nobody_could_take_it_over():
    router = router_with(endpoint("a"))
    ticket = front(router)
    router.apply("local", 2, [], [endpoint("a", state=EVICTING)])
    assert list(router.evicting()) == []
    assert router.left_behind("local") == [InFlight("a", 1, 1)]
    router.apply("local", 3, [], [endpoint("a", state=EVICTING), endpoint("b")])
    assert list(router.evicting()) == [ticket]
    assert router.left_behind("local") == [InFlight("a", 1, 0)]


@pytest.mark.parametrize(
    ("endpoints", "text"),
    [([endpoint("a"), endpoint("a")], "twice"), ([endpoint("a", cluster="other")], "another cluster")],
)
def test_refused_set_leaves_the_old_one(endpoints, text):
    router = router_with(endpoint("old"))
    with pytest.raises(ValueError, match=text):
        router.apply("local", 9, [], endpoints)
    assert (router.revision("local"), front(router).target.replica) == (1, "old")


class RouterMachine(RuleBasedStateMachine):
    """Any sequence of sets, arrivals, ends, failures and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(RoutingLimits(max_held_per_service=4, max_hold_s=5.0, avoid_s=0.5))
        self.now_s = 0.0
        self.revision = 0
        self.sets: dict[str, dict[str, Endpoint]] = {"east": {}, "west": {}}
        self.live: list = []
        self.again = 0

    def settle(self, tickets) -> None:
        """Whatever has just been assigned was routable by the newest revision, and not avoided as unreachable."""
        for ticket in tickets:
            if ticket.state is not TicketState.ASSIGNED:
                continue
            known = self.sets[ticket.target.cluster].get(ticket.target.replica)
            assert known is not None
            assert known.state is ROUTABLE
            assert known.service == ticket.service
            if ticket.stage is Stage.FRONT:
                assert known.role is not Role.DECODE
            else:
                assert known.role is Role.DECODE
                assert ticket.cluster in (None, known.cluster)

    @rule(
        cluster=st.sampled_from(["east", "west"]),
        rows=st.dictionaries(
            st.sampled_from(["r0", "r1", "r2", "r3"]),
            st.tuples(
                st.sampled_from(["chat", "sum"]), st.sampled_from(sorted(ROLES)), st.sampled_from(list(EndpointState))
            ),
        ),
    )
    def apply(self, cluster, rows) -> None:
        self.revision += 1
        endpoints = {
            name: endpoint(name, service=service, role=role, cluster=cluster, state=state)
            for name, (service, role, state) in rows.items()
        }
        self.sets[cluster] = endpoints
        self.router.apply(cluster, self.revision, [], list(endpoints.values()))
        self.settle(self.router.dispatch(now_s=self.now_s))

    @rule(
        service=st.sampled_from(["chat", "sum"]),
        stage=st.sampled_from(list(Stage)),
        pinned=st.booleans(),
        again=st.booleans(),
    )
    def submit(self, service, stage, pinned, again) -> None:
        cluster = "east" if stage is Stage.DECODE else None
        ticket = self.router.submit(service, stage, now_s=self.now_s, cluster=cluster, again=again)
        self.again += again
        ticket.movable = not pinned
        self.settle([ticket])
        self.live.append(ticket)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data) -> None:
        self.router.finish(self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    @rule(
        cluster=st.sampled_from(["east", "west"]),
        replica=st.sampled_from(["r0", "r1", "gone"]),
        failure=st.sampled_from(list(Failure)),
    )
    def fail(self, cluster, replica, failure) -> None:
        self.router.failed((cluster, replica), failure, now_s=self.now_s)

    @rule(seconds=st.sampled_from([0.1, 0.5, 3.0]))
    def wait(self, seconds) -> None:
        self.now_s += seconds
        self.settle(self.router.dispatch(now_s=self.now_s))

    @invariant()
    def in_flight_is_conserved(self) -> None:
        """Every live assigned ticket is counted exactly once, on its replica, and nothing else is."""
        assigned = [ticket for ticket in self.live if ticket.state is TicketState.ASSIGNED]
        assert self.router.total_in_flight == len(assigned)
        for key in {ticket.target.key for ticket in assigned}:
            assert self.router.in_flight(key) == sum(ticket.target.key == key for ticket in assigned)

    @invariant()
    def held_is_conserved_and_bounded(self) -> None:
        for service in ("chat", "sum"):
            held = [t for t in self.live if t.service == service and t.state is TicketState.HELD]
            assert self.router.held(service) == len(held)
            assert sum(ticket.stage is Stage.FRONT for ticket in held) <= 4 + self.again
            assert all(self.now_s - ticket.since_s <= 5.0 for ticket in held)

    @invariant()
    def acknowledgement_names_every_hidden_request(self) -> None:
        for cluster in ("east", "west"):
            reported = {item.replica: item for item in self.router.left_behind(cluster)}
            for ticket in self.live:
                if ticket.state is not TicketState.ASSIGNED or ticket.target.cluster != cluster:
                    continue
                known = self.sets[cluster].get(ticket.target.replica)
                if known is None or known.state is not ROUTABLE:
                    assert ticket.target.replica in reported
            assert all(0 <= item.pinned <= item.requests for item in reported.values())
            assert all(item.requests == self.router.in_flight((cluster, item.replica)) for item in reported.values())


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
