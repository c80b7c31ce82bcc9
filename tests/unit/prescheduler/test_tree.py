"""The tree: classes, ranges, sums, and tables that contradict themselves."""

from dataclasses import replace

import pytest

from prescheduler.core.domains import list_domains
from prescheduler.core.model import Constraint, Outcome
from prescheduler.core.tree import InventoryError, build_tree
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.domain.placement import SubgroupClass
from trimtab.domain.vocabulary import TopologyLevel

MIXED = [
    ("s2-0", "s1-0", "n0", "H20", 8, 8),
    ("s2-0", "s1-0", "n1", "H20", 8, 3),
    ("s2-1", "s1-0", "n2", "H20", 8, 8),
    ("s2-1", "s1-1", "n3", "L20", 4, 2),
    ("s2-2", "s1-0", "n4", "H20", 8, 0),
    ("s2-2", "s1-0", "n5", "L20", 4, 4),
    ("s2-2", "s1-1", "n6", "L20", 4, 4),
]


def test_classes_follow_the_gpu_mix_under_each_switch(fleet) -> None:
    tree = build_tree([fleet.cluster("a", MIXED)])
    of_s2 = [tree.domain_class(TopologyLevel.S2, domain).name for domain in range(3)]
    of_s1 = [tree.domain_class(TopologyLevel.S1, domain).name for domain in range(5)]
    assert of_s2 == ["LOW", "MEDIUM", "HIGH"]
    # The homogeneous S1 of a mixed S2 is no more than medium, also when its sibling is mixed.
    assert of_s1 == ["LOW", "MEDIUM", "MEDIUM", "HIGH", "MEDIUM"]


def test_switches_of_one_name_under_two_parents_are_two_domains(fleet) -> None:
    tree = build_tree([fleet.cluster("b", MIXED), fleet.cluster("a", MIXED)])
    assert tree.level(TopologyLevel.S1).count == 10
    assert tree.level(TopologyLevel.CLUSTER).names == ("a", "b")
    assert tree.level(TopologyLevel.S2).clusters == ("a",) * 3 + ("b",) * 3
    assert tree.level(TopologyLevel.S2).rows(3) == (7, 9)


def test_rows_of_people_give_parents_totals_and_free(fleet) -> None:
    rows = list_domains(build_tree([fleet.cluster("a", MIXED, vdc="vdc-7"), fleet.cluster("b", MIXED)]), "a")
    by_level = {level: [row for row in rows if row.level is level] for level in TopologyLevel}
    assert [
        len(by_level[level])
        for level in (TopologyLevel.CLUSTER, TopologyLevel.S2, TopologyLevel.S1, TopologyLevel.NODE)
    ] == [1, 3, 5, 7]
    assert by_level[TopologyLevel.CLUSTER][0].parent == "vdc-7"
    assert by_level[TopologyLevel.CLUSTER][0].gpus == (("H20", 32, 19), ("L20", 12, 10))
    last = by_level[TopologyLevel.S2][2]
    assert (last.name, last.parent, last.nodes, last.gpus) == ("s2-2", "a", 3, (("H20", 8, 0), ("L20", 8, 8)))
    assert by_level[TopologyLevel.NODE][3].parent == "s1-1"


def test_no_cluster_is_an_empty_tree() -> None:
    assert list_domains(build_tree([])) == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpus": (8,)}, "column gpus has 1 rows, column nodes 2"),
        ({"nodes": ("n0", "n0")}, "node 'n0' is listed twice"),
        ({"vdcs": ("v0", "v1")}, "nodes name several VDCs: v0, v1"),
        ({"nodes": ("n0", "")}, "column nodes has an empty entry in row 1"),
        ({"gpu_types": ("H20", "")}, "column gpu_types has an empty entry in row 1, with free GPUs"),
        ({"gpus": (8, 65)}, "node n1 has 65 GPUs"),
        ({"free_gpu_masks": (0x1FF, 0)}, "node n0 has 8 GPUs but its free mask is 0x1ff"),
    ],
)
def test_a_table_that_contradicts_itself_is_named(fleet, change, says) -> None:
    good = fleet.cluster("a", MIXED[:2])
    with pytest.raises(InventoryError, match=r"^cluster a: ") as refused:
        build_tree([replace(good, nodes=replace(good.nodes, **change))])
    assert says in str(refused.value)


def test_a_node_without_free_gpus_need_not_say_their_type(fleet) -> None:
    """As one of servers that somebody else started, whose GPUs nobody told of."""
    good = fleet.cluster("a", MIXED[:2])
    change = {"gpu_types": ("H20", ""), "gpus": (8, 0), "free_gpu_masks": (0xFF, 0)}
    tree = build_tree([replace(good, nodes=replace(good.nodes, **change))])
    free = {domain.name: domain for domain in list_domains(tree)}
    assert free
    assert tree.gpu_types[int(tree.type_of_row[0])] == "H20"


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (SubgroupClass, scheduler_pb2.SubgroupClass, "SUBGROUP_CLASS_"),
        (Outcome, scheduler_pb2.SchedulingOutcome, "SCHEDULING_OUTCOME_"),
        (Constraint, scheduler_pb2.BindingConstraint, "BINDING_CONSTRAINT_"),
    ],
)
def test_enums_are_those_of_the_contract(ours, theirs, prefix) -> None:
    known = {prefix + item.name: item.value for item in ours if item.value}
    assert known == {name: number for name, number in theirs.items() if number}
