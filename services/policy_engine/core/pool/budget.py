"""Whether a pool's GPUs can be read: what cannot be counted cannot be given away.

A replica that is unknown, or that its actuator does not list, may or may not be awake. One such replica closes its own
GPUs. Where no replica of a node can be read, it is not known what the node's GPUs hold, and the pool fails closed.
"""

from __future__ import annotations

from policy_engine.core.pool.gpu_layout import OverlayReplica
from policy_engine.core.pool.pool_candidates import ReplicaFacts
from trimtab.domain.vocabulary import LifeCycle


def budget_unknown(overlay: tuple[OverlayReplica, ...], replicas: tuple[ReplicaFacts, ...]) -> str:
    """Why the pool's GPUs cannot be read, naming the first node; empty when they can."""
    read = {item.replica for item in replicas if item.life_cycle != LifeCycle.UNKNOWN}
    by_node: dict[str, list[OverlayReplica]] = {}
    for item in overlay:
        by_node.setdefault(item.node, []).append(item)
    for node in sorted(by_node):
        if not any(item.replica in read for item in by_node[node]):
            gpus = len({gpu for item in by_node[node] for gpu in item.gpus})
            return f"none of the {len(by_node[node])} replicas on the {gpus} GPUs of {node} can be read"
    return ""
