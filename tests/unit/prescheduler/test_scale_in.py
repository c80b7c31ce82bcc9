"""Scale-in: which groups give up how many, and what a cycle may not do with what becomes free."""

import pytest

from prescheduler.core.groups import GroupState
from prescheduler.core.model import Outcome
from prescheduler.core.plan import plan_cycle
from prescheduler.core.scale_in import plan_scale_in
from trimtab.domain.placement import SubgroupClass
from trimtab.domain.vocabulary import Role

P, D = Role.PREFILL, Role.DECODE
LOW, MEDIUM, HIGH = SubgroupClass.LOW, SubgroupClass.MEDIUM, SubgroupClass.HIGH


def group_of(name: str, prefill: int, decode: int, subgroup_class: SubgroupClass = LOW) -> GroupState:
    counts = {P: prefill, D: decode}
    return GroupState(
        name=name,
        service="chat",
        cluster="a",
        replicas={role: tuple(f"{name}-{role}-{n}" for n in range(count)) for role, count in counts.items() if count},
        subgroup_class=subgroup_class,
    )


@pytest.mark.parametrize(
    ("groups", "surplus", "parts", "expected"),
    [
        pytest.param(
            [group_of("g0", 2, 4), group_of("g1", 1, 2, HIGH), group_of("g2", 1, 2, MEDIUM)],
            (1, 2),
            (1, 2),
            {"g1": (1, 2)},
            id="the highest class is emptied first",
        ),
        pytest.param(
            [group_of("g0", 2, 4), group_of("g1", 3, 6, HIGH)],
            (2, 4),
            (1, 2),
            {"g1": (2, 4)},
            id="the ratio is kept inside the group",
        ),
        pytest.param(
            [group_of("g0", 1, 5), group_of("g1", 1, 6)],
            (0, 1),
            (1, 5),
            {"g1": (0, 1)},
            id="one role alone is taken where there is too much of it",
        ),
        pytest.param(
            [group_of("g0", 1, 1), group_of("g1", 6, 3)],
            (0, 1),
            (2, 1),
            {"g1": (0, 1)},
            id="no group is left without decode while another can give",
        ),
        pytest.param(
            [group_of("g0", 2, 10, HIGH), group_of("g1", 2, 10)],
            (3, 15),
            (1, 5),
            {"g0": (2, 10), "g1": (1, 5)},
            id="what one group cannot give the next one gives",
        ),
        pytest.param(
            [group_of("g0", 2, 4), group_of("g1", 1, 2, HIGH)],
            (3, 6),
            (1, 2),
            {"g0": (2, 4), "g1": (1, 2)},
            id="to nothing",
        ),
    ],
)
def test_groups_give_up(groups, surplus, parts, expected) -> None:
    taken = plan_scale_in(groups, dict(zip((P, D), surplus, strict=True)), dict(zip((P, D), parts, strict=True)))
    found = {
        name: tuple(next((cut.count for cut in cuts if cut.role is role), 0) for role in (P, D))
        for (_, name), cuts in taken.items()
    }
    assert found == expected


def test_freed_gpus_wait_for_the_next_cycle(fleet) -> None:
    rows = [("s2-0", "s1-0", "n0", "H20", 2, 0)]
    there = [fleet.replica(f"r{n}", Role.COLOCATED, "n0", service="gives") for n in range(2)]
    gives = fleet.request(fleet.role(Role.COLOCATED, 0), service="gives", priority=9)
    takes = fleet.request(fleet.role(Role.COLOCATED, 1), service="takes")
    results = plan_cycle([fleet.cluster("a", rows, there)], [gives, takes], now_s=0.0).results
    assert [(item.service, item.outcome) for item in results] == [
        ("gives", Outcome.REMOVED),
        ("takes", Outcome.DENIED),
    ]
    assert results[0].groups[0].remove[0].count == 2
    assert results[0].detail == "takes 2 colocated out of g-0 of cluster a"


def test_a_denied_change_of_shape_takes_nothing_away(fleet) -> None:
    rows = [("s2-0", "s1-0", "n0", "H20", 4, 0)]
    there = [fleet.replica(f"p{n}", P, "n0") for n in range(1)] + [fleet.replica(f"d{n}", D, "n0") for n in range(3)]
    request = fleet.request(fleet.prefill(2), fleet.decode(2))
    (result,) = plan_cycle([fleet.cluster("a", rows, there)], [request], now_s=0.0).results
    assert (result.outcome, result.groups) == (Outcome.DENIED, ())


def test_replicas_that_nobody_placed_count_and_stay(fleet) -> None:
    rows = [("s2-0", "s1-0", "n0", "H20", 4, 0)]
    there = [
        fleet.replica("given", Role.COLOCATED, "elsewhere", group=""),
        fleet.replica("placed", Role.COLOCATED, "n0"),
    ]
    (result,) = plan_cycle(
        [fleet.cluster("a", rows, there)], [fleet.request(fleet.role(Role.COLOCATED, 0))], now_s=0.0
    ).results
    assert [(group.group, group.remove[0].count) for group in result.groups] == [("g-0", 1)]
