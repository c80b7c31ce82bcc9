"""Golden placements: which domain wins and why, the field cases 25 to 27, and denials in words."""

from dataclasses import replace

import pytest

from prescheduler.core.capacity import Capacity
from prescheduler.core.model import Constraint, MissingCluster, Outcome
from prescheduler.core.packing import pack
from prescheduler.core.plan import plan_cycle
from prescheduler.core.tree import build_tree
from trimtab.domain.placement import SubgroupClass
from trimtab.domain.vocabulary import Role, TopologyLevel


def homogeneous(s2: str, free: list[int], gpu_type: str = "H20", per_s1: int = 2) -> list:
    """One S2 of nodes with 8 GPUs, two to an S1."""
    return [
        (s2, f"{s2}-s1-{index // per_s1}", f"{s2}-n{index}", gpu_type, 8, count) for index, count in enumerate(free)
    ]


def plan_one(fleet, rows, *requests, replicas=(), **more):
    return plan_cycle([fleet.cluster("a", rows, replicas)], requests, now_s=100.0, **more).results


def domains_of(result) -> set:
    return {group.domain for group in result.groups}


def test_no_look_ahead_takes_the_domain_that_holds_both(fleet) -> None:
    """Case 25: one node is free in two domains, both in the third; the two replicas may not share a node."""
    rows = homogeneous("s2-0", [8, 0]) + homogeneous("s2-1", [8, 0]) + homogeneous("s2-2", [8, 8])
    (result,) = plan_one(fleet, rows, fleet.request(fleet.prefill(1, 8), fleet.decode(1, 8)))
    assert result.outcome is Outcome.PLACED
    assert domains_of(result) == {"s2-2"}
    assert {item.node for item in result.groups[0].add} == {"s2-2-n0", "s2-2-n1"}


def test_hard_limit_is_not_widened_however_full(fleet) -> None:
    """Case 26: six GPUs are free in the cluster, four at most in one S2."""
    rows = homogeneous("s2-0", [4, 0]) + homogeneous("s2-1", [2, 0])
    (result,) = plan_one(fleet, rows, fleet.request(fleet.prefill(1), fleet.decode(4)))
    assert result.outcome is Outcome.DENIED
    assert result.constraint is Constraint.AFFINITY
    assert result.groups == ()
    assert result.detail == (
        "no S2 holds 1 prefill of 1 GPU and 4 decode of 1 GPU together; "
        "s2-0 of cluster a comes nearest with 4 H20 free, of 6 in all"
    )


def test_hopeless_domains_are_rejected_by_sums(fleet, monkeypatch) -> None:
    """Case 27: 1,000 nodes, 1,000 requests, no S1 can hold any: not one packing is tried."""
    rows = [(f"s2-{i // 100:02d}", f"s1-{i // 10:03d}", f"n{i:04d}", "H20", 8, i % 2) for i in range(1000)]
    requests = [
        fleet.request(fleet.prefill(2), fleet.decode(4), service=f"svc-{i}", affinity=TopologyLevel.S1)
        for i in range(1000)
    ]
    tried = []
    monkeypatch.setattr(
        "prescheduler.core.candidates.pack", lambda *args, **more: tried.append(args) or pack(*args, **more)
    )
    results = plan_one(fleet, rows, *requests)
    assert {(item.outcome, item.constraint) for item in results} == {(Outcome.DENIED, Constraint.AFFINITY)}
    assert len(results) == 1000
    assert tried == []


def test_low_affinity_leaves_scarce_hardware_alone(fleet) -> None:
    """HeteroScale 3.4: lowest class first, though the mixed S2 would be the tighter fit."""
    rows = [
        ("s2-0", "s1-0", "mixed-h", "H20", 8, 2),
        ("s2-0", "s1-0", "mixed-l", "L20", 8, 2),
        *homogeneous("s2-1", [8, 8]),
    ]
    (result,) = plan_one(fleet, rows, fleet.request(fleet.prefill(1), fleet.decode(1), affinity=TopologyLevel.CLUSTER))
    assert {item.node for item in result.groups[0].add} == {"s2-1-n0"}
    assert result.groups[0].subgroup_class is SubgroupClass.LOW


def test_mixed_hardware_under_one_s1_is_found_when_it_is_needed(fleet) -> None:
    rows = [
        ("s2-0", "s1-0", "h0", "H20", 8, 8),
        ("s2-0", "s1-1", "l0", "L20", 8, 8),
        ("s2-1", "s1-0", "h1", "H20", 8, 8),
        ("s2-1", "s1-0", "l1", "L20", 8, 8),
    ]
    roles = (fleet.prefill(1, 2, ("L20",)), fleet.decode(2, 2, ("H20",)))
    (tight,) = plan_one(fleet, rows, fleet.request(*roles, affinity=TopologyLevel.S1))
    (wide,) = plan_one(fleet, rows, fleet.request(*roles, affinity=TopologyLevel.S2))
    assert (tight.groups[0].domain, tight.groups[0].subgroup_class) == ("s1-0", SubgroupClass.HIGH)
    assert {item.node for item in tight.groups[0].add} == {"h1", "l1"}
    assert (wide.groups[0].domain, wide.groups[0].subgroup_class) == ("s2-0", SubgroupClass.MEDIUM)


def test_existing_group_is_preferred_to_a_tighter_new_one(fleet) -> None:
    rows = homogeneous("s2-0", [3, 0]) + homogeneous("s2-1", [8, 8])
    there = [fleet.replica("p", Role.PREFILL, "s2-1-n0"), fleet.replica("d", Role.DECODE, "s2-1-n0")]
    (result,) = plan_one(fleet, rows, fleet.request(fleet.prefill(2), fleet.decode(3)), replicas=there)
    assert [(group.group, group.domain) for group in result.groups] == [("g-0", "s2-1")]
    assert sorted(item.role.value for item in result.groups[0].add) == ["decode", "decode", "prefill"]


def test_full_group_is_joined_by_a_new_one_in_another_domain(fleet) -> None:
    rows = homogeneous("s2-0", [0, 1]) + homogeneous("s2-1", [8, 8])
    there = [fleet.replica("p", Role.PREFILL, "s2-0-n0"), fleet.replica("d", Role.DECODE, "s2-0-n0")]
    (result,) = plan_one(fleet, rows, fleet.request(fleet.prefill(2), fleet.decode(3)), replicas=there)
    (group,) = result.groups
    assert group.domain == "s2-1"
    assert group.group.startswith("chat-s2-1-")


def test_decode_alone_never_opens_a_group_without_prefill(fleet) -> None:
    rows = homogeneous("s2-0", [0, 0]) + homogeneous("s2-1", [8, 8])
    there = [fleet.replica("p", Role.PREFILL, "s2-0-n0"), fleet.replica("d", Role.DECODE, "s2-0-n0")]
    (result,) = plan_one(fleet, rows, fleet.request(fleet.prefill(1), fleet.decode(2)), replicas=there)
    assert (result.outcome, result.constraint) == (Outcome.DENIED, Constraint.AFFINITY)
    assert result.detail == (
        "1 decode of 1 GPU need 1 GPU beside the group's other roles; of free GPUs s2-0 of cluster a has 0"
    )


def test_tightest_fit_then_stable_id(fleet) -> None:
    rows = homogeneous("s2-0", [8, 8]) + homogeneous("s2-1", [4, 0]) + homogeneous("s2-2", [4, 0])
    (result,) = plan_one(fleet, rows, fleet.request(fleet.prefill(1), fleet.decode(1)))
    assert domains_of(result) == {"s2-1"}


def test_preferred_type_comes_before_the_tighter_fit(fleet) -> None:
    rows = homogeneous("s2-0", [2, 0], "L20") + homogeneous("s2-1", [8, 8], "H20")
    (result,) = plan_one(fleet, rows, fleet.request(fleet.role(Role.COLOCATED, 2, 1, ("H20", "L20"))))
    (fallback,) = plan_one(fleet, rows[:2], fleet.request(fleet.role(Role.COLOCATED, 2, 1, ("H20", "L20"))))
    assert {item.gpu_type for item in result.groups[0].add} == {"H20"}
    assert {item.gpu_type for item in fallback.groups[0].add} == {"L20"}


def test_wide_limit_does_not_scatter(fleet) -> None:
    """Nodes that are almost full would be the best fit one by one; the S1 that holds all keeps KV transfers short."""
    rows = homogeneous("s2-0", [1, 0]) + homogeneous("s2-1", [1, 0]) + homogeneous("s2-2", [2, 2])
    (result,) = plan_one(fleet, rows, fleet.request(fleet.prefill(1), fleet.decode(3), affinity=TopologyLevel.CLUSTER))
    assert {item.node for item in result.groups[0].add} == {"s2-2-n0", "s2-2-n1"}


def test_gpus_of_a_replica_are_on_one_node(fleet) -> None:
    rows = homogeneous("s2-0", [3, 3, 3])
    (result,) = plan_one(fleet, rows, fleet.request(fleet.role(Role.COLOCATED, 1, 4)))
    assert (result.outcome, result.constraint) == (Outcome.DENIED, Constraint.FRAGMENTATION)
    assert result.detail == (
        "s2-0 of cluster a has enough free GPUs, but scattered over its nodes: they hold 0 of 1 colocated of 4 GPUs"
    )


@pytest.mark.parametrize(
    ("types", "count", "constraint", "says"),
    [
        ((), 9, Constraint.CAPACITY, "9 colocated of 1 GPU need 9 GPUs; 8 are free in all"),
        (
            ("L20",),
            5,
            Constraint.GPU_TYPE,
            "5 colocated of 1 L20 GPU need 5 GPUs of L20; 4 are free, and 4 of other types",
        ),
        (
            ("B300",),
            1,
            Constraint.GPU_TYPE,
            "1 colocated of 1 GPU need 1 GPU of B300; 0 are free, and 8 of other types",
        ),
    ],
)
def test_denials_name_the_binding_constraint(fleet, types, count, constraint, says) -> None:
    rows = homogeneous("s2-0", [4], "H20") + homogeneous("s2-1", [4], "L20")
    (result,) = plan_one(fleet, rows, fleet.request(fleet.role(Role.COLOCATED, count, 1, types)))
    assert (result.outcome, result.constraint) == (Outcome.DENIED, constraint)
    assert says in result.detail


def test_shortage_denies_the_low_priority_first(fleet) -> None:
    rows = homogeneous("s2-0", [4])
    low = fleet.request(fleet.role(Role.COLOCATED, 3), service="low", priority=1, created_s=1.0)
    old = fleet.request(fleet.role(Role.COLOCATED, 3), service="old", priority=5, created_s=2.0)
    new = fleet.request(fleet.role(Role.COLOCATED, 3), service="new", priority=5, created_s=3.0)
    results = plan_one(fleet, rows, low, new, old)
    assert [(item.service, item.outcome) for item in results] == [
        ("old", Outcome.PLACED),
        ("new", Outcome.DENIED),
        ("low", Outcome.DENIED),
    ]


def test_prefill_and_decode_together_or_not_at_all(fleet) -> None:
    rows = homogeneous("s2-0", [6])
    (result,) = plan_one(fleet, rows, fleet.request(fleet.prefill(2), fleet.decode(10)))
    assert result.outcome is Outcome.DENIED
    assert result.groups == ()


def test_partial_takes_the_largest_multiple_of_the_ratio(fleet) -> None:
    rows = homogeneous("s2-0", [8, 5])
    request = fleet.request(fleet.prefill(4, part=1), fleet.decode(20, part=5), allow_partial=True)
    (result,) = plan_one(fleet, rows, request)
    added = [item.role for group in result.groups for item in group.add]
    assert result.outcome is Outcome.PARTIAL
    assert (added.count(Role.PREFILL), added.count(Role.DECODE)) == (2, 10)
    assert result.constraint is Constraint.CAPACITY
    assert result.detail.startswith("placed 2 of 4 prefill and 10 of 20 decode in s2-0 of cluster a; 2 prefill of")


def test_partial_spreads_whole_units_over_domains(fleet) -> None:
    rows = homogeneous("s2-0", [7]) + homogeneous("s2-1", [7])
    request = fleet.request(fleet.prefill(3, part=1), fleet.decode(6, part=2), allow_partial=True)
    (result,) = plan_one(fleet, rows, request)
    counts = {group.domain: [item.role.value for item in group.add] for group in result.groups}
    # Two units of three GPUs fit each S2.
    assert result.outcome is Outcome.PLACED
    assert {domain: (roles.count("prefill"), roles.count("decode")) for domain, roles in counts.items()} == {
        "s2-0": (2, 4),
        "s2-1": (1, 2),
    }


def test_pending_replicas_count_and_leaving_ones_do_not(fleet) -> None:
    rows = homogeneous("s2-0", [4])
    there = [
        fleet.replica("starting", Role.COLOCATED, "s2-0-n0"),
        fleet.replica("draining", Role.COLOCATED, "s2-0-n0", leaving=True),
    ]
    (same,) = plan_one(fleet, rows, fleet.request(fleet.role(Role.COLOCATED, 1)), replicas=there)
    (more,) = plan_one(fleet, rows, fleet.request(fleet.role(Role.COLOCATED, 2)), replicas=there)
    assert (same.outcome, same.groups) == (Outcome.UNCHANGED, ())
    assert len(more.groups[0].add) == 1


def test_retried_cycle_gives_the_same_names_and_a_later_one_new_names(fleet) -> None:
    rows = homogeneous("s2-0", [8])
    request = fleet.request(fleet.role(Role.COLOCATED, 2))
    first, again = (plan_one(fleet, rows, request)[0] for _ in range(2))
    names = [item.replica for item in first.groups[0].add]
    assert names == [item.replica for item in again.groups[0].add]
    there = [fleet.replica(name, Role.COLOCATED, "s2-0-n0", group=first.groups[0].group) for name in names]
    (later,) = plan_one(fleet, rows, fleet.request(fleet.role(Role.COLOCATED, 3)), replicas=there)
    assert later.groups[0].group == first.groups[0].group
    assert not {item.replica for item in later.groups[0].add} & set(names)
    assert all(len(name) <= 63 and name.startswith("chat-colocated-") for name in names)


def test_moe_attention_and_ffn_share_an_s1_and_the_group_an_s2(fleet) -> None:
    rows = homogeneous("s2-0", [2, 1, 2, 2]) + homogeneous("s2-1", [2, 2, 0, 0])
    roles = (
        fleet.role(Role.PREFILL_ATTENTION, 2),
        fleet.role(Role.PREFILL_FFN, 2),
        fleet.decode(3),
    )
    (result,) = plan_one(fleet, rows, fleet.request(*roles, affinity=TopologyLevel.CLUSTER))
    (group,) = result.groups
    prefill = {item.node for item in group.add if item.role is not Role.DECODE}
    assert (group.domain, group.level) == ("s2-0", TopologyLevel.S2)
    # s2-0-s1-0 has three free GPUs only; attention and FFN need four under one S1.
    assert prefill == {"s2-0-n2", "s2-0-n3"}


@pytest.mark.parametrize(
    ("change", "constraint", "says"),
    [
        ({"expires_s": 100.0}, Constraint.EXPIRED, "expired at 1970-01-01T00:01:40+00:00"),
        ({"writer": "policy-engine", "token": 6}, Constraint.FENCED_OFF, "token 6 of policy-engine is fenced off"),
        ({"replica_revisions": (("b", 1),)}, Constraint.CLUSTER_UNREACHABLE, "cluster b did not answer (refused)"),
    ],
)
def test_what_may_not_be_served_is_held(fleet, change, constraint, says) -> None:
    (result,) = plan_one(
        fleet,
        homogeneous("s2-0", [8]),
        fleet.request(fleet.role(Role.COLOCATED, 1), **change),
        highest_tokens={"policy-engine": 7},
        missing=(MissingCluster(cluster="b", error="refused"),),
    )
    if "token" not in change:
        assert result.constraint is constraint
    assert (result.outcome, result.constraint, result.groups) == (Outcome.HELD, constraint, ())
    assert says in result.detail


def test_what_a_silent_cluster_holds_is_not_placed_elsewhere(fleet) -> None:
    silent = MissingCluster(cluster="b", error="no answer within 2 s", services=frozenset({"chat"}), known=True)
    chat = fleet.request(fleet.role(Role.COLOCATED, 2))
    other = fleet.request(fleet.role(Role.COLOCATED, 2), service="other", replica_revisions=(("a", 1), ("b", 1)))
    results = {item.service: item for item in plan_one(fleet, homogeneous("s2-0", [8]), chat, other, missing=(silent,))}
    assert (results["chat"].outcome, results["chat"].constraint) == (Outcome.HELD, Constraint.CLUSTER_UNREACHABLE)
    assert results["other"].outcome is Outcome.PLACED


def test_a_node_gives_each_gpu_once(fleet) -> None:
    capacity = Capacity(build_tree([fleet.cluster("a", homogeneous("s2-0", [3]))]))
    assert capacity.take(0, 2) == (0, 1)
    assert capacity.take(0, 1) == (2,)
    with pytest.raises(ValueError, match="no 1 free GPUs"):
        capacity.take(0, 1)


def test_group_grows_where_it_is(fleet) -> None:
    """Another S1 of its S2 would be the tighter fit; beside its own replicas KV transfers stay short."""
    rows = homogeneous("s2-0", [8, 8, 2, 0])
    there = [fleet.replica("p", Role.PREFILL, "s2-0-n0"), fleet.replica("d", Role.DECODE, "s2-0-n0")]
    (result,) = plan_one(fleet, rows, fleet.request(fleet.prefill(1), fleet.decode(3)), replicas=there)
    assert {item.node for item in result.groups[0].add} == {"s2-0-n0"}


def test_moe_group_grows_under_the_s1_of_its_prefill(fleet) -> None:
    rows = homogeneous("s2-0", [8, 8, 2, 0])
    there = [
        fleet.replica(role.value, role, "s2-0-n0") for role in (Role.PREFILL_ATTENTION, Role.PREFILL_FFN, Role.DECODE)
    ]
    roles = (fleet.role(Role.PREFILL_ATTENTION, 2), fleet.role(Role.PREFILL_FFN, 2), fleet.decode(1))
    (result,) = plan_one(fleet, rows, fleet.request(*roles), replicas=there)
    (full,) = plan_one(fleet, homogeneous("s2-0", [0, 0, 2, 0]), fleet.request(*roles), replicas=there)
    assert {item.node for item in result.groups[0].add} == {"s2-0-n0"}
    assert full.outcome is Outcome.DENIED


def test_tables_stay_true_to_the_nodes_they_count(fleet) -> None:
    rows = [
        *homogeneous("s2-0", [8, 5]),
        ("s2-1", "s1-0", "h1", "H20", 8, 8),
        ("s2-1", "s1-1", "l1", "L20", 8, 7),
        ("s2-2", "s1-0", "h2", "H20", 8, 6),
        ("s2-2", "s1-0", "l2", "L20", 8, 3),
    ]
    tree = build_tree([fleet.cluster("a", rows)])
    keys = [(level, size, types) for level in TopologyLevel for size in (1, 2, 3, 8) for types in ((0,), (1,), (0, 1))]
    kept = Capacity(tree)
    for key in keys:
        kept.slots(*key)
    for row, gpus in ((0, 3), (2, 8), (3, 2), (4, 1), (5, 3), (0, 5)):
        kept.take(row, gpus)
        fresh = Capacity(replace(tree, free_masks=kept.masks.copy()))
        assert all((kept.slots(*key) == fresh.slots(*key)).all() for key in keys)


def test_worked_example_of_the_docs(fleet) -> None:
    """docs/scheduling.md shows these figures."""
    rows = [
        ("s2-0", "s1-0", "n0", "H20", 8, 8),
        ("s2-0", "s1-0", "n1", "H20", 8, 2),
        ("s2-1", "s1-0", "n2", "H20", 8, 4),
        ("s2-1", "s1-1", "n3", "L20", 4, 4),
        ("s2-2", "s1-0", "n4", "H20", 8, 8),
        ("s2-2", "s1-0", "n5", "L20", 4, 4),
    ]
    h20, l20 = ("H20",), ("L20",)
    requests = [
        fleet.request(fleet.prefill(1), fleet.decode(3), service="code", priority=5, affinity=TopologyLevel.CLUSTER),
        fleet.request(fleet.prefill(1, 2, l20), fleet.decode(2, 2, h20), service="chat", priority=10),
        fleet.request(
            fleet.prefill(1, 4, l20), fleet.decode(1, 8, h20), service="draft", priority=1, affinity=TopologyLevel.S1
        ),
        fleet.request(fleet.prefill(1, 1, l20), fleet.decode(4, 1, h20), service="late", affinity=TopologyLevel.S2),
    ]
    late = (
        "no S2 holds 1 prefill of 1 L20 GPU and 4 decode of 1 H20 GPU together; "
        "s2-0 of cluster a comes nearest with 6 H20 and 0 L20 free, of 8 in all"
    )
    results = plan_one(fleet, rows, *requests)
    shown = [
        (item.service, item.outcome.name, [group.subgroup_class.name for group in item.groups], item.detail)
        for item in results
    ]
    assert shown == [
        ("chat", "PLACED", ["MEDIUM"], "placed 1 prefill and 2 decode in s2-1 of cluster a"),
        ("code", "PLACED", ["LOW"], "placed 1 prefill and 3 decode in cluster a"),
        ("draft", "PLACED", ["HIGH"], "placed 1 prefill and 1 decode in s1-0 of cluster a"),
        ("late", "DENIED", [], late),
    ]
    nodes = {item.service: sorted({new.node for group in item.groups for new in group.add}) for item in results}
    assert nodes == {"chat": ["n2", "n3"], "code": ["n0", "n1"], "draft": ["n4", "n5"], "late": []}


def test_a_group_takes_no_gpu_of_another_domain_however_well_it_fits(fleet) -> None:
    """The one free GPU of the other S2 is the tightest fit for prefill; no S1 of the first S2 holds both roles."""
    nodes = [
        ("s2-0", "s1-0", "n0", "H20", 8, 8),
        ("s2-0", "s1-1", "n1", "H20", 8, 8),
        ("s2-1", "s1-2", "n2", "H20", 8, 1),
    ]
    request = fleet.request(fleet.role(Role.PREFILL, 1, 1), fleet.role(Role.DECODE, 1, 8), affinity=TopologyLevel.S2)
    (result,) = plan_one(fleet, nodes, request)
    (group,) = result.groups
    assert group.domain == "s2-0"
    assert {item.node for item in group.add} == {"n0", "n1"}
