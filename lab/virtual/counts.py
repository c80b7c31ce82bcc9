"""Autoscalers that answer with counts, in a pool: which replicas sleep and wake to reach the counts.

A policy without knowledge of GPUs gives the number of replicas of each service. `choose_awake` turns that into an awake
set: awake replicas stay as far as possible, the least loaded go to sleep, single-GPU replicas fill broken pairs first,
and where a larger replica finds its GPUs scattered, small ones move out of its way. So no baseline loses by the
placement of its replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from actuator.core.fencing import Refused
from lab.baselines.interface import Desired, FleetView, Replica, RoleKey, RoleView, Traffic
from lab.virtual.control import MemberScore, PoolDesk, PoolLook, ReplicaSample
from policy_engine.core.pool.gpu_layout import Gpu, OverlayReplica, adopt_awake
from policy_engine.core.pool.transition_outcome import awake_after
from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.domain.operation import Operation, OperationState, StepKind
from trimtab.domain.replica import Replica as ListedReplica
from trimtab.domain.vocabulary import LifeCycle

Tick = Callable[[FleetView], Desired]


class CountController:
    """A baseline on the pool. `tick` is called every `period_s`; its counts need not fit, see `choose_awake`."""

    reads_windows = False

    def __init__(self, tick: Tick, *, period_s: float, within_budget: bool = True) -> None:
        self.period_s = period_s
        self._ask = tick
        self._within_budget = within_budget
        self._wanted: dict[RoleKey, int] = {}
        self._since_s: float | None = None

    def tick(self, look: PoolLook, desk: PoolDesk) -> None:
        """Compute counts, and request the awake set that has them."""
        if self._since_s is not None and look.now_s - self._since_s < self.period_s - 1e-6:
            return
        self._since_s = look.now_s
        desired = self._ask(self._view(look, desk))
        self._wanted = dict(desired)
        wanted = {key: desired.get(RoleKey(key.service, key.role), 0) for key in sorted(set(desk.members.values()))}
        awake = choose_awake(desk.overlay, desk.awake, wanted, look.replicas, busy=desk.busy())
        if awake == desk.awake:
            return
        try:
            desk.ask(awake)
        except Refused:
            # The next tick requests it again; the desk has counted it.
            return

    def ended(self, operation: Operation, now_s: float, desk: PoolDesk) -> None:
        """Undo what did not succeed, so that the next tick sees it and requests it again."""
        del now_s
        if operation.state is OperationState.SUCCEEDED:
            return
        moved = {step.replica for step in operation.steps}
        kept = [name for name in desk.awake if name not in moved]
        released = [step.replica for step in operation.steps if step.kind is StepKind.RELEASE]
        back = moved & awake_after(operation.state, released=released, replicas=desk.replicas())
        given_back = [name for name in released if name in back]
        try:
            desk.ask(adopt_awake(desk.overlay, (*kept, *back), prefer=(*kept, *given_back)))
        except Refused:
            # The desk has counted it.
            return

    def scores(self) -> Mapping[MemberKey, MemberScore]:
        """None: counts are not ranked."""
        return {}

    def _view(self, look: PoolLook, desk: PoolDesk) -> FleetView:
        roles = []
        awake: dict[MemberKey, list[str]] = {}
        for name in desk.awake:
            awake.setdefault(desk.members[name], []).append(name)
        for key in sorted(set(desk.members.values())):
            spec = desk.by_name[key.service].spec.role(key.role)
            if spec is None:
                continue
            role_key = RoleKey(key.service, key.role)
            names = awake.get(key, [])
            traffic = look.traffic.get(key.service)
            roles.append(
                RoleView(
                    key=role_key,
                    replicas=tuple(_replica(name, look) for name in names),
                    desired=self._wanted.get(role_key, len(names)),
                    min_replicas=spec.min_replicas,
                    max_replicas=spec.max_replicas,
                    gpus_per_replica=spec.gpus_per_replica,
                    traffic=None
                    if traffic is None
                    else Traffic(
                        interval_s=traffic.interval_s,
                        requests=float(traffic.arrivals),
                        prompt_tokens=_mean(traffic.prompt_tokens, traffic.arrivals),
                        output_tokens=_mean(traffic.output_tokens, traffic.arrivals),
                        ttft_s=traffic.ttft_s,
                        itl_s=traffic.itl_s,
                    ),
                )
            )
        budget = desk.pool.spec.budget_gpus if self._within_budget else None
        return FleetView(now_s=look.now_s, roles=tuple(roles), budget_gpus=budget)


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


def _replica(name: str, look: PoolLook) -> Replica:
    facts, sample = look.replicas.get(name), look.samples.get(name)
    ready = facts is not None and facts.routable
    if sample is None or not ready:
        return Replica(name=name, ready=ready)
    return ready_replica(name, sample)


def ready_replica(name: str, sample: ReplicaSample) -> Replica:
    """A replica that serves, as baselines see it."""
    return Replica(
        name=name,
        ready=True,
        kv_usage_ratio=sample.kv_usage_ratio,
        running=float(sample.running),
        waiting=float(sample.waiting),
        gpu_utilization_ratio=sample.gpu_utilisation_ratio,
        prompt_tps=sample.prompt_tps,
        output_tps=sample.output_tps,
        kv_blocks=sample.kv_blocks,
        waiting_kv_blocks=float(sample.waiting_kv_blocks),
    )


def choose_awake(
    overlay: Sequence[OverlayReplica],
    awake: Sequence[str],
    wanted: Mapping[MemberKey, int],
    replicas: Mapping[str, ListedReplica],
    *,
    busy: Sequence[str] = (),
) -> tuple[str, ...]:
    """An awake set with `wanted` replicas of each member, or as near to it as the GPUs allow, by name.

    Replicas that are `busy` in an operation stay as they are. Members with large replicas choose first; a member that
    finds no room gets fewer.
    """
    by_name = {item.replica: item for item in overlay}
    fixed = frozenset(busy)
    kept = set(awake)
    for key in sorted(wanted):
        mine = [by_name[name] for name in sorted(kept) if by_name[name].member == key]
        going = sorted(
            (item for item in mine if item.replica not in fixed),
            key=lambda item: (_routable(item, replicas), _load(item, replicas), item.replica),
        )
        for item in going[: max(0, len(mine) - wanted[key])]:
            kept.discard(item.replica)
    for key in sorted(wanted, key=lambda key: (-_size(overlay, key), key)):
        missing = wanted[key] - sum(1 for name in kept if by_name[name].member == key)
        for _ in range(missing):
            room = _room_for(overlay, kept, key, replicas, fixed)
            if room is None:
                break
            kept = room
    return tuple(sorted(kept))


def _room_for(
    overlay: Sequence[OverlayReplica],
    kept: set[str],
    key: MemberKey,
    replicas: Mapping[str, ListedReplica],
    fixed: frozenset[str],
) -> set[str] | None:
    """`kept` with one more replica of `key`, small ones moved out of its way if need be; None without room."""
    by_name = {item.replica: item for item in overlay}
    users: dict[Gpu, OverlayReplica] = {gpu: by_name[name] for name in sorted(kept) for gpu in by_name[name].gpus}
    best: tuple[tuple[int, int, int, str], set[str]] | None = None
    for item in overlay:
        if item.member != key or item.replica in kept or item.replica in fixed or not _sleeps(item, replicas):
            continue
        in_the_way = {users[gpu].replica: users[gpu] for gpu in item.gpus if gpu in users}
        if any(name in fixed or len(other.gpus) >= len(item.gpus) for name, other in in_the_way.items()):
            continue
        after = (kept - set(in_the_way)) | {item.replica}
        for other in sorted(in_the_way.values(), key=lambda other: other.replica):
            moved = _room_for(overlay, after, other.member, replicas, fixed | frozenset(in_the_way))
            if moved is None:
                break
            after = moved
        else:
            load = sum(_load(other, replicas) for other in in_the_way.values())
            rank = (len(in_the_way), load, -_neighbours(item, users), item.replica)
            if best is None or rank < best[0]:
                best = (rank, after)
    return None if best is None else best[1]


def _neighbours(item: OverlayReplica, users: Mapping[Gpu, OverlayReplica]) -> int:
    """How many GPUs of its pairs are taken: a broken pair is filled before a whole one is broken."""
    pairs = {(node, index // 2) for node, index in item.gpus}
    return sum(1 for node, index in users if (node, index // 2) in pairs)


def _size(overlay: Sequence[OverlayReplica], key: MemberKey) -> int:
    return max((len(item.gpus) for item in overlay if item.member == key), default=0)


def _routable(item: OverlayReplica, replicas: Mapping[str, ListedReplica]) -> bool:
    facts = replicas.get(item.replica)
    return facts is not None and facts.routable


def _sleeps(item: OverlayReplica, replicas: Mapping[str, ListedReplica]) -> bool:
    facts = replicas.get(item.replica)
    return facts is not None and facts.life_cycle == LifeCycle.SLEEPING


def _load(item: OverlayReplica, replicas: Mapping[str, ListedReplica]) -> int:
    facts = replicas.get(item.replica)
    return 0 if facts is None or facts.in_flight is None else facts.in_flight
