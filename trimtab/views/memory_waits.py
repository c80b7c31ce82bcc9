"""Which servers of a pool cannot come up yet: each starts with all its memory, and a neighbour is awake on its GPUs.

That is so after the servers of a pool were started anew together, as by `trimtab up` on a folder that it used before:
the server that gets a GPU's memory first serves, and the others wait for it until a transition makes room. No serving
server is put to sleep for that alone, unless the pool asks for it (`prewarm`). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import policy_pb2

_AWAKE = (
    types_pb2.LIFE_CYCLE_ACTIVE,
    types_pb2.LIFE_CYCLE_DRAINING,
    types_pb2.LIFE_CYCLE_REACTIVATING,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingForMemory:
    """Servers of one service that cannot come up beside their neighbours."""

    service: str
    replicas: tuple[str, ...]
    neighbours: tuple[str, ...]
    """Services whose replicas are awake on the GPUs, by name."""
    pooled: bool | None = None
    """Whether a pool has the service as a member; its servers stay when it has it no longer. None: not known."""
    prewarm: bool | None = None
    """Whether that pool pre-warms servers; None where no pool can, where there is none, or where it is not known."""

    def __str__(self) -> str:
        neighbours = " and ".join(self.neighbours)
        uses = "uses" if len(self.neighbours) == 1 else "use"
        return (
            f"{self.service}: {len(self.replicas)} starting, and waiting for GPU memory that {neighbours} {uses}; "
            f"{self._remedy()}"
        )

    def _remedy(self) -> str:
        if self.pooled is False:
            return "it is a member of no pool, so no transition makes room"
        if self.prewarm is None:
            return "a transition makes room"
        if self.prewarm:
            return "a transition makes room, or the pool's pre-warming once the load allows it"
        return "a transition makes room, or `prewarm: true` in the pool's spec"


def waiting_for_memory(
    replicas: Iterable[actuator_pb2.Replica], pools: Iterable[policy_pb2.Pool] | None, *, fixed: bool = False
) -> list[WaitingForMemory]:
    """By service. A starting server that shares no GPU with an awake one is on its way, and is not among them.

    `pools` are all that there are, None when they could not be read. `fixed`: the actuator makes and deletes no
    servers, and so pre-warms none.
    """
    prewarm = (
        None if pools is None else {item.service: pool.spec.prewarm for pool in pools for item in pool.spec.members}
    )
    listed = list(replicas)
    awake: dict[tuple[str, str, int], str] = {}
    for replica in listed:
        if replica.life_cycle in _AWAKE:
            awake.update({(replica.cluster, replica.node, index): replica.service for index in replica.gpu_indices})
    waiting: dict[str, list[str]] = {}
    neighbours: dict[str, set[str]] = {}
    for replica in sorted(listed, key=lambda item: item.replica):
        gpus = ((replica.cluster, replica.node, index) for index in replica.gpu_indices)
        found = {awake[gpu] for gpu in gpus if gpu in awake}
        if replica.pool and replica.life_cycle == types_pb2.LIFE_CYCLE_STARTING and found:
            waiting.setdefault(replica.service, []).append(replica.replica)
            neighbours.setdefault(replica.service, set()).update(found)
    return [
        WaitingForMemory(
            service=name,
            replicas=tuple(waiting[name]),
            neighbours=tuple(sorted(neighbours[name])),
            pooled=None if prewarm is None else name in prewarm,
            prewarm=None if prewarm is None or fixed else prewarm.get(name),
        )
        for name in sorted(waiting)
    ]
