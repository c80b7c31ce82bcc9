"""How long one scheduling cycle takes, and how that grows with the fleet: ``python -m bench.place --json``.

The fleet is half free at random, two GPU types, mixed as racks are. The requests are P/D services of one to four GPUs
a replica under S1, S2 and cluster affinity. Timed is the whole pure cycle: tree, groups, placement; in CPU seconds, so
that a busy machine gives the same figures.
"""

import math
import random
import statistics
import sys
import time
from collections import Counter

from bench._report import machine, main_of
from prescheduler.core.model import ClusterInventory, Plan
from prescheduler.core.plan import plan_cycle
from trimtab.domain.inventory import NodeColumns
from trimtab.domain.scaling import RoleRequest, ScalingRequest
from trimtab.domain.vocabulary import Role, TopologyLevel

NODES = (1_000, 4_000, 16_000)
REQUESTS = 200
REPEATS = 3
CLUSTERS = 4
NODES_PER_S1 = 8
NODES_PER_S2 = 64
GPUS_PER_NODE = 8
SEED = 7
GROWTH_BAR = 0.6
HOPELESS_BAR_S = 0.5


def build_fleet(nodes: int, *, max_free: int = GPUS_PER_NODE) -> list[ClusterInventory]:
    """Clusters of equal size; every node has 0 to ``max_free`` free GPUs."""
    dice = random.Random(SEED)
    per_cluster = nodes // CLUSTERS
    return [
        ClusterInventory(
            cluster=f"cluster-{number}",
            inventory_revision=1,
            nodes=NodeColumns(
                nodes=tuple(f"node-{index:06d}" for index in range(per_cluster)),
                vdcs=("vdc-0",) * per_cluster,
                s2s=tuple(f"s2-{index // NODES_PER_S2:04d}" for index in range(per_cluster)),
                s1s=tuple(f"s1-{index // NODES_PER_S1:05d}" for index in range(per_cluster)),
                gpu_types=tuple(_gpu_type(index) for index in range(per_cluster)),
                gpus=(GPUS_PER_NODE,) * per_cluster,
                free_gpu_masks=tuple((1 << dice.randint(0, max_free)) - 1 for _ in range(per_cluster)),
            ),
        )
        for number in range(CLUSTERS)
    ]


def _gpu_type(index: int) -> str:
    """Of four S2s two are homogeneous, one mixes S1s, one mixes nodes under its S1s."""
    kind = index // NODES_PER_S2 % 4
    mixed = index // NODES_PER_S1 if kind == 2 else index if kind == 3 else kind
    return ("H20", "L20")[mixed % 2]


def build_requests(count: int) -> list[ScalingRequest]:
    """P/D services, three priorities, three affinities."""
    affinities = (TopologyLevel.S1, TopologyLevel.S2, TopologyLevel.CLUSTER)
    return [
        ScalingRequest(
            service=f"service-{number:04d}",
            decision_id=f"d-{number}",
            priority=number % 3,
            affinity=affinities[number % 3],
            roles=(
                RoleRequest(
                    role=Role.PREFILL,
                    replicas=1 + number % 2,
                    gpus_per_replica=2,
                    gpu_types=("L20", "H20") if number % 2 else (),
                ),
                RoleRequest(
                    role=Role.DECODE, replicas=2 + number % 4, gpus_per_replica=(1, 4)[number % 2], ratio_part=2
                ),
            ),
        )
        for number in range(count)
    ]


def timed(fleet: list[ClusterInventory], requests: list[ScalingRequest]) -> tuple[float, Plan]:
    """Median CPU seconds of a few cycles, and the plan."""
    seconds = []
    for _ in range(REPEATS):
        started = time.thread_time()
        plan = plan_cycle(fleet, requests, now_s=0.0)
        seconds.append(time.thread_time() - started)
    return statistics.median(seconds), plan


def run() -> dict[str, object]:
    """All figures as one document."""
    requests = build_requests(REQUESTS)
    rows = []
    for nodes in NODES:
        cycle_s, plan = timed(build_fleet(nodes), requests)
        outcomes = Counter(result.outcome.name.lower() for result in plan.results)
        rows.append({"nodes": nodes, "cycle_cpu_s": cycle_s, "outcomes": dict(sorted(outcomes.items()))})
    # No S1 of the fleet can hold any of these: every domain is rejected by sums.
    hopeless = [request for request in build_requests(3 * REQUESTS) if request.affinity is TopologyLevel.S1]
    hopeless_s, hopeless_plan = timed(build_fleet(NODES[0], max_free=1), hopeless)
    first, last = rows[0], rows[-1]
    growth = math.log(float(str(last["cycle_cpu_s"])) / float(str(first["cycle_cpu_s"]))) / math.log(
        NODES[-1] / NODES[0]
    )
    return {
        "bench": "place",
        "machine": machine(),
        "inputs": {
            "nodes": list(NODES),
            "requests": REQUESTS,
            "clusters": CLUSTERS,
            "gpus_per_node": GPUS_PER_NODE,
            "repeats": REPEATS,
            "seed": SEED,
        },
        "results": {
            "cycles": rows,
            "growth_exponent": growth,
            "hopeless": {
                "nodes": NODES[0],
                "requests": len(hopeless),
                "cycle_cpu_s": hopeless_s,
                "placed": sum(1 for result in hopeless_plan.results if result.groups),
            },
        },
        "bars": [
            {"name": "place_growth_exponent", "value": growth, "bar": GROWTH_BAR, "ok": growth <= GROWTH_BAR},
            {
                "name": "place_hopeless_cycle_cpu_s",
                "value": hopeless_s,
                "bar": HOPELESS_BAR_S,
                "ok": hopeless_s <= HOPELESS_BAR_S,
            },
        ],
    }


def main() -> int:
    """Print the figures; exit status 1 when a bar is missed."""
    return main_of(run, "time of a scheduling cycle by size of the fleet")


if __name__ == "__main__":
    sys.exit(main())
