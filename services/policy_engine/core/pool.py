"""One tick of a pool: shares and guards of its members, the arbiter, and the desired awake set that follows.

The awake set is absolute. It changes by one bounded transition at a time; while one is under way nothing is decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from policy_engine.core.arbiter import Verdict, arbitrate
from policy_engine.core.arena import Arena, MemberState, ReplicaFacts
from policy_engine.core.draft import (
    HOLD_MEMORY_S,
    CountChange,
    Draft,
    HoldNotes,
    NamedSignal,
    Transition,
    note_clamps,
)
from policy_engine.core.guards import GuardState, check_guards
from policy_engine.core.overlay import OverlayReplica, Resident, adopt_awake, first_awake, make_overlay, member_key
from policy_engine.core.signals import FrontDoor, RoleSignals, fresh_front_door, fresh_role
from policy_engine.core.tss import Share, ShareState, share_of
from policy_engine.core.vocabulary import Clamp, ClampKind, DecisionKind, MemberKey, Rule
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.config.specs import PoolMember
from trimtab.words import Role

RETRY_FIRST_S = 10.0
RETRY_MAX_S = 300.0
# A loop is due a little early rather than a whole tick late.
DUE_SLACK_S = 0.05


@dataclass(frozen=True, slots=True)
class Barred:
    """A replica whose transition failed: left alone until `until_s`, longer each time."""

    replica: str
    until_s: float
    failures: int


@dataclass(frozen=True, slots=True)
class MemberMemory:
    """What is kept of one member from tick to tick."""

    key: MemberKey
    share: ShareState = field(default_factory=ShareState)
    received_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class PoolState:
    """What a pool's next tick rests on beside its signals; kept in the store."""

    members: tuple[MemberMemory, ...] = ()
    barred: tuple[Barred, ...] = ()
    fast_at_s: float | None = None
    slow_at_s: float | None = None
    notes: HoldNotes = ()
    # Urgent events that a record tells of already as not served, with the time each was last seen.
    unserved: tuple[tuple[str, float], ...] = ()

    def memory(self, key: MemberKey) -> MemberMemory:
        """What is known of `key`, or a blank."""
        return next((item for item in self.members if item.key == key), MemberMemory(key))


@dataclass(frozen=True, slots=True)
class PoolInput:
    """One tick's input, whole. `views` and `fronts` hold what was observed; an absent one was never observed.

    `unreachable` and `under_way` say why nothing may be decided: an actuator that does not answer, a transition.
    """

    now_s: float
    pool: Pool
    policies: tuple[ServicePolicy, ...]
    overlay: tuple[OverlayReplica, ...]
    awake: tuple[str, ...]
    replicas: tuple[ReplicaFacts, ...]
    views: tuple[tuple[MemberKey, RoleSignals], ...]
    fronts: tuple[tuple[str, FrontDoor], ...]
    state: PoolState
    unreachable: str = ""
    under_way: str = ""
    # The rule and the receivers of the transition under way.
    under_way_rule: Rule | None = None
    under_way_receivers: tuple[MemberKey, ...] = ()
    # Replicas that the actuator is repairing.
    busy: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberReport:
    """A member's standing at this tick, for status and metrics."""

    key: MemberKey
    share: Share
    guard: GuardState
    awake: int
    routable: int


@dataclass(frozen=True, slots=True)
class PoolResult:
    """The next state and awake set, every member's standing, the decision worth a record, why the pool holds.

    `preempt` says why the transition under way should be cancelled; empty when it should go on.
    """

    state: PoolState
    awake: tuple[str, ...]
    reports: tuple[MemberReport, ...]
    draft: Draft | None
    holding: str = ""
    preempt: str = ""


def decide_pool(given: PoolInput) -> PoolResult:
    """One tick of one pool."""
    members, memories = _members(given)
    arena = Arena(
        overlay=given.overlay,
        awake=given.awake,
        members=members,
        replicas=given.replicas,
        residence_s=given.pool.spec.residence_s,
        barred=frozenset(item.replica for item in given.state.barred if item.until_s > given.now_s).union(given.busy),
    )
    reports = tuple(
        MemberReport(item.key, item.share, item.guard, arena.awake_count(item.key), arena.routable_count(item.key))
        for item in members
    )
    state = replace(given.state, members=memories)
    if given.pool.metadata.paused or given.unreachable:
        return _held(given, state, reports)
    if given.under_way:
        holding = f"operation {given.under_way} is under way"
        return PoolResult(state, given.awake, reports, None, holding, _preempts(given, members))
    fast_due = _due(given.now_s, given.state.fast_at_s, given.pool.spec.rescue_interval_s)
    slow_due = _due(given.now_s, given.state.slow_at_s, given.pool.spec.rebalance_interval_s)
    state = replace(
        state,
        fast_at_s=given.now_s if fast_due else state.fast_at_s,
        slow_at_s=given.now_s if slow_due else state.slow_at_s,
    )
    verdict = arbitrate(arena, fast_due=fast_due, slow_due=slow_due)
    return _apply(given, arena, state, reports, verdict)


def _preempts(given: PoolInput, members: tuple[MemberState, ...]) -> str:
    """A rebalance gives way to a hard-guard breach of somebody else's; nothing else interrupts a transition."""
    if given.under_way_rule != Rule.REBALANCE:
        return ""
    for member in members:
        if member.guard.hard and member.share.demand and member.key not in given.under_way_receivers:
            return f"{member.key}: {member.guard.hard}"
    return ""


def _due(now_s: float, last_s: float | None, interval_s: float) -> bool:
    return last_s is None or now_s < last_s or now_s - last_s >= interval_s - DUE_SLACK_S


def _members(given: PoolInput) -> tuple[tuple[MemberState, ...], tuple[MemberMemory, ...]]:
    policies = {policy.name: policy for policy in given.policies}
    views, fronts = dict(given.views), dict(given.fronts)
    routable = _routable(given)
    members: list[MemberState] = []
    memories: list[MemberMemory] = []
    for entry in given.pool.spec.members:
        key = member_key(entry)
        policy = policies.get(entry.service)
        role = policy.spec.role(entry.role) if policy is not None else None
        profile = policy.spec.token_service_share if policy is not None else None
        memory = given.state.memory(key)
        if policy is None or role is None or profile is None:
            # Without its policy a member can neither gain nor give; it keeps what it has.
            memories.append(memory)
            continue
        staleness_s = policy.spec.staleness_s
        view = fresh_role(views.get(key, RoleSignals(role=entry.role)), now_s=given.now_s, staleness_s=staleness_s)
        front = fresh_front_door(fronts.get(entry.service, FrontDoor()), now_s=given.now_s, staleness_s=staleness_s)
        if not _takes_held(given.pool, entry, routable):
            front = replace(front, held=replace(front.held, value=0.0 if front.held.value is not None else None))
        share, share_state = share_of(profile, view, front, routable=routable.get(key, 0), previous=memory.share)
        received = memory.received_at_s
        members.append(
            MemberState(
                key=key,
                floor=role.min_replicas,
                ceiling=role.max_replicas,
                priority=policy.spec.priority,
                share=share,
                guard=check_guards(policy.spec.guards, view),
                received_ago_s=None if received is None else max(0.0, given.now_s - received),
            )
        )
        memories.append(MemberMemory(key, share_state, received))
    return tuple(members), tuple(memories)


def _routable(given: PoolInput) -> dict[MemberKey, int]:
    names = {item.replica for item in given.replicas if item.routable}
    counts: dict[MemberKey, int] = {}
    for item in given.overlay:
        if item.replica in names:
            counts[item.member] = counts.get(item.member, 0) + 1
    return counts


def _takes_held(pool: Pool, entry: PoolMember, routable: dict[MemberKey, int]) -> bool:
    """Held requests wait for a stage without a routable replica; else for prefill, which every request meets first."""
    stages = [member for member in pool.spec.members if member.service == entry.service]
    if len(stages) == 1:
        return True
    empty = [stage for stage in stages if routable.get(member_key(stage), 0) == 0]
    if empty:
        return entry in empty
    return entry.role == Role.PREFILL


def _held(given: PoolInput, state: PoolState, reports: tuple[MemberReport, ...]) -> PoolResult:
    paused = given.pool.metadata.paused
    detail = "paused by an operator" if paused else given.unreachable
    count = float(len(given.awake))
    clamp = Clamp(ClampKind.PAUSED if paused else ClampKind.UNREACHABLE, count, count, detail)
    notes, new = note_clamps(state.notes, (clamp,), given.now_s)
    draft = None
    if new:
        draft = Draft(DecisionKind.HOLD, given.pool.name, Rule.HOLD, f"keeps its awake set: {detail}", clamps=(clamp,))
    return PoolResult(replace(state, notes=notes), given.awake, reports, draft, detail)


def _apply(
    given: PoolInput, arena: Arena, state: PoolState, reports: tuple[MemberReport, ...], verdict: Verdict
) -> PoolResult:
    notes, new_clamps = note_clamps(state.notes, verdict.clamps, given.now_s)
    state = replace(state, notes=notes)
    if verdict.transition is None:
        draft = None
        state, new_events = _note_unserved(state, verdict.unserved, given.now_s)
        if (new_clamps and verdict.holding) or new_events:
            draft = Draft(
                DecisionKind.HOLD,
                given.pool.name,
                Rule.HOLD,
                verdict.holding,
                inputs=pool_inputs(given, reports),
                clamps=verdict.clamps,
                candidates=verdict.candidates,
            )
        return PoolResult(state, given.awake, reports, draft, verdict.holding)
    transition = verdict.transition
    awake = after(given.awake, transition)
    receivers = {MemberKey(change.service, change.role) for change in transition.wakes}
    state = replace(
        state,
        members=tuple(
            replace(item, received_at_s=given.now_s) if item.key in receivers else item for item in state.members
        ),
    )
    draft = Draft(
        DecisionKind.TRANSITION,
        given.pool.name,
        verdict.rule,
        verdict.reason,
        inputs=pool_inputs(given, reports),
        clamps=verdict.clamps,
        counts=_counts(reports, transition),
        transition=transition,
        candidates=verdict.candidates,
    )
    return PoolResult(state, awake, reports, draft)


def _note_unserved(state: PoolState, events: tuple[str, ...], now_s: float) -> tuple[PoolState, bool]:
    """Whether an event is new. As with clamps, one that comes and goes makes one record a minute at the most."""
    known = {event: seen_s for event, seen_s in state.unserved if 0 <= now_s - seen_s <= HOLD_MEMORY_S}
    new = any(event not in known for event in events)
    known.update(dict.fromkeys(events, now_s))
    return replace(state, unserved=tuple(sorted(known.items()))), new


def after(awake: tuple[str, ...], transition: Transition) -> tuple[str, ...]:
    """The awake set after `transition`."""
    released = {change.replica for change in transition.releases}
    woken = {change.replica for change in transition.wakes}
    return tuple(sorted((set(awake) - released) | woken))


def _counts(reports: tuple[MemberReport, ...], transition: Transition) -> tuple[CountChange, ...]:
    found: list[CountChange] = []
    for item in reports:
        gained = sum(1 for change in transition.wakes if MemberKey(change.service, change.role) == item.key)
        given_up = sum(1 for change in transition.releases if MemberKey(change.service, change.role) == item.key)
        if gained or given_up:
            count = item.awake + gained - given_up
            found.append(CountChange(item.key.service, item.key.role, item.awake, count))
    return tuple(found)


def pool_inputs(given: PoolInput, reports: tuple[MemberReport, ...]) -> tuple[NamedSignal, ...]:
    """Every member's signals, as they were observed."""
    found: list[NamedSignal] = []
    views, fronts = dict(given.views), dict(given.fronts)
    for item in reports:
        view = views.get(item.key, RoleSignals(role=item.key.role))
        front = fronts.get(item.key.service, FrontDoor())
        found += [
            NamedSignal(f"{item.key} decode_tps", "tokens/s", view.decode_tps),
            NamedSignal(f"{item.key} prefill_tps", "tokens/s", view.prefill_tps),
            NamedSignal(f"{item.key} running", "requests", view.running),
            NamedSignal(f"{item.key} waiting", "requests", view.waiting),
            NamedSignal(f"{item.key} held", "requests", front.held),
            NamedSignal(f"{item.key} ttft_p95", "s", view.ttft_p95_s),
            NamedSignal(f"{item.key} tpot_p95", "s", view.tpot_p95_s),
            NamedSignal(f"{item.key} kv_usage", "ratio", view.kv_usage_ratio),
        ]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class BirthInput:
    """What a pool's layout is made from.

    `overlay` is what the pool had, empty for one that the store does not know; `awake` is its desired awake set, or
    then the replicas that are awake in the cluster already. `residents` exist already and keep their names.
    """

    pool: Pool
    policies: tuple[ServicePolicy, ...]
    overlay: tuple[OverlayReplica, ...] = ()
    awake: tuple[str, ...] = ()
    residents: tuple[Resident, ...] = ()


@dataclass(frozen=True, slots=True)
class Birth:
    """A layout and the awake set to start with."""

    overlay: tuple[OverlayReplica, ...]
    awake: tuple[str, ...]
    draft: Draft


def lay_out(given: BirthInput) -> Birth:
    """The overlay of a pool and its awake set. Raises OverlayError.

    Whoever is awake and still fits stays awake: a lost store or a new layout changes no count by itself. Members that
    are new get what is free beside those, and the arbiter sees to floors that are left.
    """
    policies = {policy.name: policy for policy in given.policies}
    overlay = make_overlay(given.pool, policies, given.residents)
    first = first_awake(given.pool, policies, overlay)
    awake = first
    if given.awake:
        known = {item.member for item in given.overlay or overlay}
        kept = adopt_awake(overlay, given.awake)
        added = tuple(item.replica for item in overlay if item.replica in first and item.member not in known)
        awake = adopt_awake(overlay, (*kept, *added), prefer=kept)
    verb = "is laid out anew" if given.overlay else "is taken over" if given.awake else "is born"
    by_name = {item.replica: item for item in overlay}
    counts: list[CountChange] = []
    for entry in given.pool.spec.members:
        key = member_key(entry)
        count = sum(1 for name in awake if by_name[name].member == key)
        before = sum(1 for name in given.awake if name in by_name and by_name[name].member == key)
        counts.append(CountChange(key.service, key.role, before, count))
    words = ", ".join(f"{change.after} {change.service}" for change in counts)
    reason = f"{given.pool.name} {verb} with {words} awake of {len(overlay)} replicas"
    draft = Draft(DecisionKind.POOL_BIRTH, given.pool.name, Rule.INITIAL, reason, counts=tuple(counts))
    return Birth(overlay, awake, draft)


def bar(state: PoolState, replicas: tuple[str, ...], now_s: float) -> PoolState:
    """Leave the replicas of a failed transition alone for a while, twice as long each time in a row."""
    known = {item.replica: item for item in state.barred if item.until_s + RETRY_MAX_S > now_s}
    for name in replicas:
        failures = known[name].failures + 1 if name in known else 1
        wait_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** (failures - 1))
        known[name] = Barred(name, now_s + wait_s, failures)
    return replace(state, barred=tuple(known[name] for name in sorted(known)))


def settle(
    overlay: tuple[OverlayReplica, ...], desired: tuple[str, ...], transition: Transition, awake_now: frozenset[str]
) -> tuple[str, ...]:
    """The awake set after a transition that was rolled back or failed: what is really awake, as far as it moved.

    Replicas that the transition did not touch stay as desired. Where two that are awake claim one GPU, the one that
    was to be released keeps it: it never left.
    """
    moved = {change.replica for change in (*transition.releases, *transition.wakes)}
    kept = [name for name in desired if name not in moved]
    back = [name for name in sorted(moved) if name in awake_now]
    released = [change.replica for change in transition.releases]
    return adopt_awake(overlay, (*kept, *back), prefer=(*kept, *(name for name in released if name in back)))
