"""The state of each member of a pool at a tick: its share, guards and load, and what is remembered of it.

The result is the arbiter's input, and the memories for the next tick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from policy_engine.core.pool.donors import HEALTHY_Z
from policy_engine.core.pool.gpu_layout import OverlayReplica, member_key
from policy_engine.core.pool.guards import QueueMemory, check_guards, lost_ratio, remember_queue
from policy_engine.core.pool.load import (
    ArrivalMemory,
    OutputMemory,
    load_of,
    recall,
    remember_arrivals,
    remember_output,
)
from policy_engine.core.pool.pool_candidates import EFFECT_AFTER_S, LOST, MemberState, ReplicaFacts
from policy_engine.core.pool.predict import Elasticity, await_effect, congestion, learn
from policy_engine.core.pool.sustained_need import NeedMemory, remember_need
from policy_engine.core.pool.tss import ShareState, share_of, waiting_weight_of
from policy_engine.core.shared.draft import Transition
from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.config.specs import PoolMember, RoleSpec, TokenServiceShare
from trimtab.domain.role_signals import FrontDoor, RoleSignals, fresh_front_door, fresh_role
from trimtab.domain.vocabulary import Role

MAX_PRIORITY_STEPS = 8


@dataclass(frozen=True, slots=True)
class MemberMemory:
    """What is kept of one member from tick to tick.

    `moved_at_s`: the end of its last move, as far as it was seen; `moved_to`: the awake replicas that the move was to
    leave it. With another number the move was taken back, and is none. `began_at_s`: the end of the first window that
    had demand after one that had none.
    """

    key: MemberKey
    share: ShareState = field(default_factory=ShareState)
    received_at_s: float | None = None
    moved_at_s: float | None = None
    moved_to: int | None = None
    output: OutputMemory = field(default_factory=OutputMemory)
    queue: QueueMemory = field(default_factory=QueueMemory)
    elasticity: Elasticity = field(default_factory=Elasticity)
    arrivals: ArrivalMemory = field(default_factory=ArrivalMemory)
    spells: NeedMemory = field(default_factory=NeedMemory)
    was_idle: bool = False
    began_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The pool itself at this tick."""

    now_s: float
    pool: Pool
    policies: tuple[ServicePolicy, ...]
    overlay: tuple[OverlayReplica, ...]
    awake: tuple[str, ...]
    replicas: tuple[ReplicaFacts, ...]


@dataclass(frozen=True, slots=True)
class _Counts:
    """Replicas by member."""

    routable: Mapping[MemberKey, int]
    awake: Mapping[MemberKey, int]
    lost: Mapping[MemberKey, int]


def look_at_members(
    snapshot: PoolSnapshot,
    views: Mapping[MemberKey, RoleSignals],
    fronts: Mapping[str, FrontDoor],
    memories: Mapping[MemberKey, MemberMemory],
    moving: Set[MemberKey],
) -> tuple[tuple[MemberState, ...], tuple[MemberMemory, ...]]:
    """Every member in the pool's order. `moving` are those of transitions under way."""
    policies = {policy.name: policy for policy in snapshot.policies}
    counts = _counts(snapshot)
    members: list[MemberState] = []
    kept: list[MemberMemory] = []
    for entry in snapshot.pool.spec.members:
        key = member_key(entry)
        policy = policies.get(entry.service)
        role = policy.spec.role(entry.role) if policy is not None else None
        profile = policy.spec.share_profile(entry.role) if policy is not None else None
        memory = memories.get(key, MemberMemory(key))
        if policy is None or role is None or profile is None:
            # Without its policy a member can neither gain nor give; it keeps what it has.
            kept.append(memory)
            continue
        staleness_s = policy.spec.staleness_s
        view = fresh_role(views.get(key, RoleSignals(role=entry.role)), now_s=snapshot.now_s, staleness_s=staleness_s)
        front = fresh_front_door(fronts.get(entry.service, FrontDoor()), now_s=snapshot.now_s, staleness_s=staleness_s)
        if not _takes_held(snapshot.pool, entry, counts.routable):
            front = replace(front, held=replace(front.held, value=0.0 if front.held.value is not None else None))
        member, memory = _one(snapshot, policy, role, profile, view, front, counts, memory, moves=key in moving)
        members.append(member)
        kept.append(memory)
    return tuple(members), tuple(kept)


def _one(
    snapshot: PoolSnapshot,
    policy: ServicePolicy,
    role: RoleSpec,
    profile: TokenServiceShare,
    view: RoleSignals,
    front: FrontDoor,
    counts: _Counts,
    memory: MemberMemory,
    *,
    moves: bool,
) -> tuple[MemberState, MemberMemory]:
    rules, key, now_s = snapshot.pool.spec.rules, memory.key, snapshot.now_s
    routable = counts.routable.get(key, 0)
    output = remember_output(memory.output, view)
    share, share_state = share_of(
        profile,
        view,
        front,
        routable=routable,
        previous=memory.share,
        waiting_weight=waiting_weight_of(profile.waiting_weight, policy.spec.slo, role.role, output.tokens),
    )
    queue = remember_queue(memory.queue, view, front, routable=routable)
    load = load_of(rules.load, profile, view, front, tpot_s=policy.spec.slo.tpot_s, routable=routable, memory=output)
    arrivals = remember_arrivals(memory.arrivals, load, front.window_end_s, rules.load.memory_s)
    if load is not None:
        load = recall(load, arrivals, rules.load)
    starved = share.fit and share.demand and share.z is not None and share.z < HEALTHY_Z
    spells = remember_need(memory.spells, load, front.window_end_s, rules.load, starved=starved)
    began_at_s = memory.began_at_s
    if memory.was_idle and not share.idle:
        began_at_s = view.window_end_s
    stands = memory.moved_to is None or memory.moved_to == counts.awake.get(key, 0)
    moved_at_s = now_s if moves else memory.moved_at_s if stands else None
    elasticity = memory.elasticity
    seen_at_s = None if moved_at_s is None else moved_at_s + max(EFFECT_AFTER_S, rules.settle_s)
    if seen_at_s is not None and view.window_end_s is not None and view.window_end_s >= seen_at_s:
        elasticity = learn(elasticity, replicas=routable, z=share.z if share.fit and share.demand else None, load=load)
    lost = lost_ratio(awake=counts.awake.get(key, 0), lost=counts.lost.get(key, 0))
    steps = min(MAX_PRIORITY_STEPS, max(-MAX_PRIORITY_STEPS, policy.spec.priority))
    member = MemberState(
        key=key,
        floor=role.min_replicas,
        ceiling=role.max_replicas,
        priority=policy.spec.priority,
        share=share,
        guard=check_guards(policy.spec.guards, view, queue_growth=queue.growth, lost=lost),
        received_ago_s=_ago(memory.received_at_s, now_s),
        load=load,
        moved_ago_s=_ago(moved_at_s, now_s),
        waits_s=spells.waits_s(rules.load) if load is not None else 0.0,
        brief=spells.brief if load is not None else 0.0,
        began_ago_s=None if view.window_end_s is None else _ago(began_at_s, view.window_end_s),
        weight=float(rules.priority_base**steps),
        exponent=elasticity.exponent,
        lost_at_capacity=congestion(profile, policy.spec.slo),
    )
    kept = replace(
        memory,
        share=share_state,
        moved_at_s=moved_at_s,
        moved_to=memory.moved_to if stands else None,
        output=output,
        queue=queue,
        elasticity=elasticity,
        arrivals=arrivals,
        spells=spells,
        was_idle=share.idle,
        began_at_s=began_at_s,
    )
    return member, kept


def _ago(at_s: float | None, now_s: float) -> float | None:
    return None if at_s is None else max(0.0, now_s - at_s)


def _counts(snapshot: PoolSnapshot) -> _Counts:
    facts = {item.replica: item for item in snapshot.replicas}
    desired = set(snapshot.awake)
    routable: dict[MemberKey, int] = {}
    awake: dict[MemberKey, int] = {}
    lost: dict[MemberKey, int] = {}
    for item in snapshot.overlay:
        fact = facts.get(item.replica)
        if fact is not None and fact.routable:
            routable[item.member] = routable.get(item.member, 0) + 1
        if item.replica in desired:
            awake[item.member] = awake.get(item.member, 0) + 1
            if fact is None or fact.life_cycle in LOST:
                lost[item.member] = lost.get(item.member, 0) + 1
    return _Counts(routable, awake, lost)


def _takes_held(pool: Pool, entry: PoolMember, routable: Mapping[MemberKey, int]) -> bool:
    """Held requests wait for a stage without a routable replica; else for prefill, which every request meets first."""
    stages = [member for member in pool.spec.members if member.service == entry.service]
    if len(stages) == 1:
        return True
    empty = [stage for stage in stages if routable.get(member_key(stage), 0) == 0]
    if empty:
        return entry in empty
    return entry.role == Role.PREFILL


def note_move(
    memories: tuple[MemberMemory, ...],
    members: tuple[MemberState, ...],
    counts: Mapping[MemberKey, tuple[int, int]],
    transition: Transition,
    now_s: float,
) -> tuple[MemberMemory, ...]:
    """The memories once `transition` is decided: which members gain or move, and their Z and load before it.

    `counts` are awake and routable replicas by member, before it.
    """
    gained = Counter(MemberKey(change.service, change.role) for change in transition.wakes)
    given = Counter(MemberKey(change.service, change.role) for change in transition.releases)
    states = {item.key: item for item in members}
    found: list[MemberMemory] = []
    for item in memories:
        state = states.get(item.key)
        if state is None or not (gained[item.key] or given[item.key]):
            found.append(item)
            continue
        awake, routable = counts.get(item.key, (0, 0))
        known = state.share.z if state.share.fit and state.share.demand else None
        found.append(
            replace(
                item,
                moved_at_s=now_s,
                moved_to=awake + gained[item.key] - given[item.key],
                received_at_s=now_s if gained[item.key] else item.received_at_s,
                elasticity=await_effect(item.elasticity, replicas=routable, z=known, load=state.load),
            )
        )
    return tuple(found)
