"""What becomes of a plan: the actuators' answers folded in, and results kept over cycles."""

import pytest

from prescheduler.core.model import Constraint, Outcome, Plan, ServiceResult
from prescheduler.core.placement_backoff import note_placements
from prescheduler.core.plan import plan_cycle
from prescheduler.core.result_choice import settle
from prescheduler.core.writes import ClusterWrite, fold_writes
from prescheduler.shell import codec
from trimtab.domain.placement import GroupPlacement, ScaleIn, SubgroupClass
from trimtab.domain.vocabulary import Role, TopologyLevel


def result_of(outcome: Outcome, *groups: GroupPlacement, decision: str = "d-1", **more: object) -> ServiceResult:
    return ServiceResult(service="chat", decision_id=decision, outcome=outcome, groups=groups, **more)  # type: ignore


def change(cluster: str) -> GroupPlacement:
    return GroupPlacement(
        group=f"g-{cluster}",
        service="chat",
        cluster=cluster,
        domain="s2-0",
        level=TopologyLevel.S2,
        subgroup_class=SubgroupClass.MEDIUM,
        decision_id="d-1",
        remove=(ScaleIn(role=Role.DECODE, count=1),),
    )


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (result_of(Outcome.PLACED, change("a")), result_of(Outcome.UNCHANGED), "before"),
        (result_of(Outcome.REMOVED, change("a")), result_of(Outcome.UNCHANGED), "before"),
        (
            result_of(Outcome.PLACED, change("a")),
            result_of(Outcome.HELD, constraint=Constraint.EXPIRED),
            "before",
        ),
        (
            result_of(Outcome.PLACED, change("a")),
            result_of(Outcome.HELD, constraint=Constraint.CLUSTER_UNREACHABLE),
            "after",
        ),
        (result_of(Outcome.PLACED, change("a")), result_of(Outcome.UNCHANGED, decision="d-2"), "after"),
        (result_of(Outcome.PLACED, change("a")), result_of(Outcome.PLACED, change("b")), "after"),
        (result_of(Outcome.PARTIAL, change("a")), result_of(Outcome.DENIED), "before"),
        (result_of(Outcome.PARTIAL, change("a")), result_of(Outcome.PLACED, change("b")), "after"),
        (result_of(Outcome.DENIED), result_of(Outcome.UNCHANGED), "after"),
        (None, result_of(Outcome.UNCHANGED), "after"),
    ],
)
def test_a_decision_that_was_carried_out_stays_so(before, after, kept) -> None:
    assert settle(before, after) is (before if kept == "before" else after)


@pytest.mark.parametrize(
    ("writes", "outcome", "constraint", "groups", "says"),
    [
        ({"a": {}, "b": {}}, Outcome.REMOVED, Constraint.NONE, ["a", "b"], ""),
        (
            {"a": {"refused": {"g-a": "a floor"}}, "b": {}},
            Outcome.PARTIAL,
            Constraint.ACTUATOR_REFUSED,
            ["b"],
            "cluster a refused group g-a: a floor; the next cycle",
        ),
        (
            {"a": {"error": "outdated"}, "b": {"error": "outdated"}},
            Outcome.DENIED,
            Constraint.ACTUATOR_REFUSED,
            [],
            "cluster b refused the write: outdated; the next cycle tries again",
        ),
        (
            {"a": {"error": "outdated", "outdated": True}, "b": {"error": "outdated", "outdated": True}},
            Outcome.HELD,
            Constraint.ACTUATOR_REFUSED,
            [],
            "cluster a refused the write: outdated",
        ),
        (
            {"a": {"error": "deadline exceeded", "unanswered": True}, "b": {"error": "outdated"}},
            Outcome.HELD,
            Constraint.CLUSTER_UNREACHABLE,
            [],
            "cluster a did not answer the write: deadline exceeded",
        ),
    ],
)
def test_what_an_actuator_refuses_is_not_reported_as_done(writes, outcome, constraint, groups, says) -> None:
    plan = Plan(results=(result_of(Outcome.REMOVED, change("a"), change("b")),))
    answers = {cluster: ClusterWrite(**({"refused": {}} | given)) for cluster, given in writes.items()}
    (folded,) = fold_writes(plan, answers).results
    assert (folded.outcome, folded.constraint) == (outcome, constraint)
    assert [group.cluster for group in folded.groups] == groups
    assert says in folded.detail


def test_results_survive_the_store() -> None:
    result = result_of(Outcome.PARTIAL, change("a"), constraint=Constraint.AFFINITY, detail="x")
    assert codec.result_from_wire(codec.result_to_wire(result)) == result


def test_replicas_that_never_come_to_life_are_placed_ever_more_rarely(fleet) -> None:
    """The actuator takes away what cannot be created; without a pace each cycle would place it again."""
    inventory = fleet.cluster("a", [("s2-0", "s1-0", "n0", "H20", 8, 8)])
    backoffs, placed_at = {}, []
    for second in range(0, 200, 5):
        request = fleet.request(fleet.role(Role.COLOCATED, 1))
        plan = plan_cycle([inventory], [request], now_s=float(second), backoffs=backoffs)
        backoffs = note_placements(backoffs, plan, now_s=float(second), first_wait_s=10.0)
        (result,) = plan.results
        if result.outcome is Outcome.PLACED:
            placed_at.append(second)
        elif second == 35:
            held = result
    assert placed_at == [0, 10, 30, 70, 150]
    assert held.outcome is Outcome.HELD
    assert held.detail == (
        "placed 3 times for this decision, and replicas are missing again; the actuator's operations say why; "
        "next try at 1970-01-01T00:01:10+00:00"
    )
    there = [fleet.replica(name, Role.COLOCATED, "n0") for name in backoffs["chat"].replicas]
    grown = fleet.cluster("a", [("s2-0", "s1-0", "n0", "H20", 8, 7)], there)
    (bit_by_bit,) = plan_cycle(
        [grown], [fleet.request(fleet.role(Role.COLOCATED, 2))], now_s=155.0, backoffs=backoffs
    ).results
    (other,) = plan_cycle(
        [inventory], [fleet.request(fleet.role(Role.COLOCATED, 1), decision_id="d-2")], now_s=155.0, backoffs=backoffs
    ).results
    (later,) = plan_cycle([inventory], [request], now_s=2000.0, backoffs=backoffs).results
    later_paces = note_placements(backoffs, Plan(results=(later,)), now_s=2000.0, first_wait_s=10.0)
    assert {bit_by_bit.outcome, other.outcome, later.outcome} == {Outcome.PLACED}
    assert later_paces["chat"].placements == 1
