"""What holds for every fleet and every set of requests."""

import random
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from prescheduler.core.model import ClusterInventory, Outcome, ScaledReplica
from prescheduler.core.plan import plan_cycle
from tests.support.properties import costly
from trimtab.domain.inventory import NodeColumns
from trimtab.domain.scaling import RoleRequest, ScalingRequest
from trimtab.domain.vocabulary import Role, TopologyLevel

TYPES = ("H20", "L20", "A100")


@st.composite
def inventories(draw: st.DrawFn) -> list[ClusterInventory]:
    found = []
    for cluster in ("a", "b")[: draw(st.integers(1, 2))]:
        count = draw(st.integers(1, 12))
        sizes = [draw(st.integers(0, 8)) for _ in range(count)]
        replicas = [
            ScaledReplica(
                name=f"{cluster}-r{number}",
                service=draw(st.sampled_from(("svc-0", "svc-1"))),
                role=draw(st.sampled_from((Role.PREFILL, Role.DECODE))),
                cluster=cluster,
                node=f"n{draw(st.integers(0, count - 1))}",
                group=f"g-{draw(st.integers(0, 1))}",
                leaving=draw(st.booleans()),
            )
            for number in range(draw(st.integers(0, 4)))
        ]
        found.append(
            ClusterInventory(
                cluster=cluster,
                inventory_revision=1,
                nodes=NodeColumns(
                    nodes=tuple(f"n{index}" for index in range(count)),
                    vdcs=("v",) * count,
                    s2s=tuple(f"s2-{draw(st.integers(0, 2))}" for _ in range(count)),
                    s1s=tuple(f"s1-{draw(st.integers(0, 2))}" for _ in range(count)),
                    gpu_types=tuple(draw(st.sampled_from(TYPES)) for _ in range(count)),
                    gpus=tuple(sizes),
                    free_gpu_masks=tuple(draw(st.integers(0, (1 << size) - 1)) for size in sizes),
                ),
                replicas=tuple(replicas),
            )
        )
    return found


@st.composite
def scaling_requests(draw: st.DrawFn) -> list[ScalingRequest]:
    found = []
    for number in range(draw(st.integers(1, 5))):
        roles = draw(
            st.sampled_from(
                (
                    (Role.COLOCATED,),
                    (Role.PREFILL, Role.DECODE),
                    (Role.PREFILL_ATTENTION, Role.PREFILL_FFN, Role.DECODE),
                )
            )
        )
        found.append(
            ScalingRequest(
                service=f"svc-{number}",
                decision_id=f"d-{number}",
                affinity=draw(st.sampled_from(list(TopologyLevel))),
                priority=draw(st.integers(0, 2)),
                created_s=draw(st.sampled_from((None, 1.0, 2.0))),
                allow_partial=draw(st.booleans()),
                roles=tuple(
                    RoleRequest(
                        role=role,
                        replicas=draw(st.integers(0, 6)),
                        gpus_per_replica=draw(st.sampled_from((1, 2, 3, 4, 8))),
                        gpu_types=tuple(draw(st.lists(st.sampled_from(TYPES), max_size=2, unique=True))),
                        ratio_part=draw(st.integers(1, 3)),
                    )
                    for role in roles
                ),
            )
        )
    return found


def switches(inventory: ClusterInventory, node: str) -> dict[TopologyLevel, tuple[str, ...]]:
    row = inventory.nodes.nodes.index(node)
    s2, s1 = inventory.nodes.s2s[row], inventory.nodes.s1s[row]
    return {
        TopologyLevel.CLUSTER: (),
        TopologyLevel.S2: (s2,),
        TopologyLevel.S1: (s2, s1),
        TopologyLevel.NODE: (s2, s1, node),
    }


@costly(max_examples=100)
@given(inventories(), scaling_requests())
def test_no_gpu_is_given_twice_and_each_replica_is_on_one_node_of_an_allowed_type(fleet, requests) -> None:
    plan = plan_cycle(fleet, requests, now_s=0.0)
    masks = {
        (item.cluster, node): (mask, gpu_type)
        for item in fleet
        for node, mask, gpu_type in zip(item.nodes.nodes, item.nodes.free_gpu_masks, item.nodes.gpu_types, strict=True)
    }
    wanted = {(request.service, role.role): role for request in requests for role in request.roles}
    names = [replica.name for item in fleet for replica in item.replicas]
    for group in (group for result in plan.results for group in result.groups):
        for item in group.add:
            mask, gpu_type = masks[group.cluster, item.node]
            role = wanted[group.service, item.role]
            assert len(set(item.gpu_indices)) == role.gpus_per_replica
            assert all(mask >> index & 1 for index in item.gpu_indices), "a GPU that was not free"
            assert not role.gpu_types or gpu_type in role.gpu_types
            masks[group.cluster, item.node] = mask & ~sum(1 << index for index in item.gpu_indices), gpu_type
            names.append(item.replica)
    assert len(names) == len(set(names))


@costly(max_examples=100)
@given(inventories(), scaling_requests())
def test_counts_come_out_as_asked_or_stay(fleet, requests) -> None:
    plan = plan_cycle(fleet, requests, now_s=0.0)
    present: dict[tuple[str, Role], int] = {}
    for replica in (replica for item in fleet for replica in item.replicas if not replica.leaving):
        present[replica.service, replica.role] = present.get((replica.service, replica.role), 0) + 1
    for result in plan.results:
        request = next(item for item in requests if item.service == result.service)
        after = dict(present)
        for group in result.groups:
            for item in group.add:
                after[result.service, item.role] = after.get((result.service, item.role), 0) + 1
            for cut in group.remove:
                after[result.service, cut.role] -= cut.count
        counts = [
            (present.get((result.service, role.role), 0), after.get((result.service, role.role), 0), role.replicas)
            for role in request.roles
        ]
        if result.outcome in (Outcome.PLACED, Outcome.REMOVED, Outcome.UNCHANGED):
            assert all(now == asked for _, now, asked in counts)
        elif not request.allow_partial:
            assert result.outcome is Outcome.DENIED
            assert all(before == now for before, now, _ in counts), "half of a request was done"
        assert all(min(before, asked) <= now <= max(before, asked) for before, now, asked in counts)


@costly(max_examples=100)
@given(inventories(), scaling_requests())
def test_a_group_never_straddles_its_domain_nor_lacks_a_role(fleet, requests) -> None:
    plan = plan_cycle(fleet, requests, now_s=0.0)
    by_name = {item.cluster: item for item in fleet}
    for result in plan.results:
        request = next(item for item in requests if item.service == result.service)
        for group in result.groups:
            if not group.add:
                continue
            inventory = by_name[group.cluster]
            old = [
                item
                for item in inventory.replicas
                if (item.group, item.service, item.leaving) == (group.group, group.service, False)
            ]
            places = [switches(inventory, item.node)[request.bound_level] for item in (*old, *group.add)]
            assert len(set(places)) == 1
            roles = {item.role for item in (*old, *group.add)}
            assert {role.role for role in request.roles if role.replicas} <= roles
            if request.is_moe:
                prefill = (Role.PREFILL_ATTENTION, Role.PREFILL_FFN)
                inner = {switches(inventory, i.node)[TopologyLevel.S1] for i in (*old, *group.add) if i.role in prefill}
                assert len(inner) <= 1


@costly(max_examples=100)
@given(inventories(), scaling_requests(), st.randoms(use_true_random=False))
def test_the_order_of_what_is_given_changes_nothing(fleet, requests, shuffler: random.Random) -> None:
    def shuffled(item: ClusterInventory) -> ClusterInventory:
        order = list(range(len(item.nodes.nodes)))
        shuffler.shuffle(order)
        columns = {name: tuple(getattr(item.nodes, name)[i] for i in order) for name in item.nodes.__slots__}
        replicas = list(item.replicas)
        shuffler.shuffle(replicas)
        return ClusterInventory(
            cluster=item.cluster,
            inventory_revision=1,
            nodes=NodeColumns(**columns),
            replicas=tuple(replicas),
        )

    other_fleet, other_requests = [shuffled(item) for item in fleet], list(requests)
    shuffler.shuffle(other_fleet)
    shuffler.shuffle(other_requests)
    assert plan_cycle(other_fleet, other_requests, now_s=0.0) == plan_cycle(fleet, requests, now_s=0.0)


def fits_somehow(frees: list[int], sizes: list[int]) -> bool:
    """Exhaustive: whether replicas of ``sizes`` GPUs fit nodes with ``frees`` free ones."""
    if not sizes:
        return True
    for index in range(len(frees)):
        if frees[index] >= sizes[0] and frees[index] not in frees[:index]:
            rest = [*frees[:index], frees[index] - sizes[0], *frees[index + 1 :]]
            if fits_somehow(rest, sizes[1:]):
                return True
    return False


@costly(max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=3), min_size=1, max_size=3),
    st.sampled_from(((1, 1), (2, 1), (1, 4), (8, 2), (4, 4))),
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
)
def test_what_fits_is_found_when_sizes_divide_one_another(domains, sizes, counts) -> None:
    """A denial is never a mistake of the packing; and what is too much is never squeezed in."""
    rows = [(f"s2-{number}", free) for number, frees in enumerate(domains) for free in frees]
    inventory = ClusterInventory(
        cluster="a",
        inventory_revision=1,
        nodes=NodeColumns(
            nodes=tuple(f"n{index}" for index in range(len(rows))),
            vdcs=("v",) * len(rows),
            s2s=tuple(s2 for s2, _ in rows),
            s1s=tuple(f"s1-{index % 2}" for index in range(len(rows))),
            gpu_types=("H20",) * len(rows),
            gpus=(8,) * len(rows),
            free_gpu_masks=tuple((1 << free) - 1 for _, free in rows),
        ),
    )
    roles = tuple(
        RoleRequest(role=role, replicas=count, gpus_per_replica=size)
        for role, count, size in zip((Role.PREFILL, Role.DECODE), counts, sizes, strict=True)
    )
    request = ScalingRequest(service="svc", decision_id="d", affinity=TopologyLevel.S2, roles=roles)
    (result,) = plan_cycle([inventory], [request], now_s=0.0).results
    wanted = sorted((size for count, size in zip(counts, sizes, strict=True) for _ in range(count)), reverse=True)
    possible = any(fits_somehow(frees, wanted) for frees in domains)
    assert (result.outcome is Outcome.PLACED) == possible


REPLAY = """
import hashlib
from prescheduler.core.model import ClusterInventory
from prescheduler.core.plan import plan_cycle
from trimtab.domain.inventory import NodeColumns
from trimtab.domain.scaling import RoleRequest, ScalingRequest
from trimtab.domain.vocabulary import Role, TopologyLevel
n = 24
nodes = NodeColumns(nodes=tuple(f"n{i}" for i in range(n)), vdcs=("v",) * n,
    s2s=tuple(f"s2-{i // 8}" for i in range(n)),
    s1s=tuple(f"s1-{i // 4}" for i in range(n)), gpu_types=tuple(("H20", "L20")[i // 4 % 2] for i in range(n)),
    gpus=(8,) * n, free_gpu_masks=tuple((1 << i % 9) - 1 for i in range(n)))
fleet = [ClusterInventory(cluster=c, inventory_revision=1, nodes=nodes) for c in "ab"]
requests = [ScalingRequest(service=f"svc-{i}", decision_id="d", affinity=TopologyLevel.S2,
    allow_partial=i % 2 == 0, roles=(
    RoleRequest(role=Role.PREFILL, replicas=1 + i % 3, gpus_per_replica=2, gpu_types=("L20", "H20")),
    RoleRequest(role=Role.DECODE, replicas=2 + i % 4, gpus_per_replica=1))) for i in range(12)]
print(hashlib.sha256(repr(plan_cycle(fleet, requests, now_s=0.0)).encode()).hexdigest())
"""


def test_hash_seed_changes_nothing() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", REPLAY], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
