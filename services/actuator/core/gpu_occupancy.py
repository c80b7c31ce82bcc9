"""Which replicas are on which GPU: awake ones, sleepers, and what is free.

TRE accounts for hot-switch capacity above Kubernetes (TRE, V-A): a sleeper keeps its allocation, and a GPU
whose replicas are all asleep is capacity. Here a GPU may be given to a replica only when every other replica on it is
known not to be awake *and* the measured memory says so: memory comes free seconds after ``/sleep`` has answered.
"""

from collections.abc import Iterable, Mapping

from actuator.core.model import Gpu, Limits, PlacedSpec, Replica
from actuator.core.world import RunState, World
from trimtab.domain.vocabulary import LifeCycle

# A server that fell asleep longer ago has let go of its memory, whether or not that was measured.
_LETS_GO_WITHIN_S = 10.0


def exited(replica: Replica, world: World) -> bool:
    """Whether its process is gone by the backend's list, so that it uses no memory."""
    if world.listed is None:
        return False
    listed = world.listed.get(replica.name)
    return listed is not None and listed.run_state is RunState.EXITED


def occupies(replica: Replica, world: World) -> bool:
    """Whether the replica must be assumed to use its GPUs. Only a sleeper and a dead process do not."""
    if replica.life_cycle is LifeCycle.SLEEPING:
        return False
    return not (replica.life_cycle is LifeCycle.FAILED and exited(replica, world))


def _up(replica: Replica, world: World) -> bool:
    probe = world.probes.get(replica.name)
    return probe is not None and probe.healthy


def _measured(placed: PlacedSpec, world: World) -> bool:
    """Whether the memory of its GPUs is measured at all; without that, the servers' own reports count."""
    return world.measures_gpus and (world.measured_nodes is None or placed.node in world.measured_nodes)


def sharing(placed: PlacedSpec, replicas: Mapping[str, Replica]) -> list[Replica]:
    """Other replicas that share a GPU with ``placed``, by name."""
    mine = set(placed.gpus)
    return [
        replicas[name]
        for name in sorted(replicas)
        if name != placed.replica and not mine.isdisjoint(replicas[name].gpus)
    ]


def in_the_way(placed: PlacedSpec, replicas: Mapping[str, Replica], world: World) -> list[Replica]:
    """Neighbours that use the GPUs of ``placed``, or may come to use them, by name."""
    return [
        other
        for other in sharing(placed, replicas)
        if occupies(other, world) and not _shut_out(other, placed, replicas, world)
    ]


def blockers(
    placed: PlacedSpec, replicas: Mapping[str, Replica], world: World, limits: Limits, *, taking_back: bool = False
) -> list[str]:
    """Why the replica may not use its GPUs yet, as text; empty when it may.

    ``taking_back``: it was there last and is to come back. Memory in use on the GPU is then its own.
    """
    neighbours = sharing(placed, replicas)
    awake = [f"{other.name} is {other.life_cycle}" for other in in_the_way(placed, replicas, world)]
    if awake or not _measured(placed, world):
        return awake
    reasons = []
    for gpu in placed.gpus:
        node, index = gpu
        on_gpu = [other for other in neighbours if gpu in other.gpus]
        if taking_back and _was_last(placed, replicas, on_gpu):
            continue
        measured = world.gpu_memory.get(gpu)
        if measured is None:
            reasons.append(f"the memory of GPU {node}/{index} was not measured")
            continue
        if measured.as_of_s <= max((other.since_s for other in on_gpu), default=0.0):
            reasons.append(f"the memory of GPU {node}/{index} was measured before its last occupant slept")
            continue
        sleepers = len(on_gpu) + (1 if placed.replica in replicas else 0)
        allowed_gib = sleepers * limits.sleeper_hbm_gib + limits.hbm_slack_gib
        if measured.used_gib > allowed_gib:
            reasons.append(f"GPU {node}/{index} still has {measured.used_gib:.1f} GiB in use")
    return reasons


def _was_last(placed: PlacedSpec, replicas: Mapping[str, Replica], on_gpu: list[Replica]) -> bool:
    """It was there last, and alone: one that fell asleep just before was awake beside it, and may hold memory still."""
    own = replicas.get(placed.replica)
    return own is not None and all(own.since_s - other.since_s > _LETS_GO_WITHIN_S for other in on_gpu)


def _shut_out(other: Replica, placed: PlacedSpec, replicas: Mapping[str, Replica], world: World) -> bool:
    """Whether ``other`` starts and cannot come up: a replica serves on a GPU of it that ``placed`` does not need.

    A server that waits for memory does not listen, so it may be FAILED too. Only where memory is measured, which
    proves it.
    """
    starts = other.life_cycle in (LifeCycle.STARTING, LifeCycle.FAILED)
    if not starts or _up(other, world) or not _measured(placed, world):
        return False
    elsewhere = set(other.gpus) - set(placed.gpus)
    return any(
        third.life_cycle is LifeCycle.ACTIVE and not elsewhere.isdisjoint(third.gpus)
        for third in sharing(other.placed, replicas)
    )


def awake_gpus(replicas: Iterable[Replica], world: World) -> dict[Gpu, list[str]]:
    """Replicas that use each GPU, by name; the invariant is at most one.

    A starting server counts once it answers: before that it may wait for the memory that another has.
    """
    users: dict[Gpu, list[str]] = {}
    for replica in sorted(replicas, key=lambda replica: replica.name):
        starts = replica.life_cycle is LifeCycle.STARTING and not _up(replica, world)
        if occupies(replica, world) and not starts:
            for gpu in replica.gpus:
                users.setdefault(gpu, []).append(replica.name)
    return users


def taken_gpus(replicas: Mapping[str, Replica], claimed: Iterable[Gpu], world: World) -> frozenset[Gpu]:
    """GPUs that no new scaled replica may get: of replicas in any state, ``claimed`` ones, what the backend has taken.

    ``claimed`` are GPUs of pools, and of records that cannot be read.
    """
    taken = {gpu for replica in replicas.values() for gpu in replica.gpus}
    taken.update(claimed)
    taken.update((node.node, index) for node in world.nodes.values() for index in node.taken)
    return frozenset(taken)
