"""One tick of a pool: shares and guards of its members, the arbiter, and the desired awake set that follows.

The awake set is absolute. It changes by one bounded transition at a time; while one is under way nothing is decided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policy_engine.core.pool.arbiter import Verdict, arbitrate
from policy_engine.core.pool.budget import budget_unknown
from policy_engine.core.pool.gpu_layout import Gpu, OverlayReplica, adopt_awake
from policy_engine.core.pool.members import MemberMemory, PoolSnapshot, look_at_members, note_move
from policy_engine.core.pool.pool_candidates import MemberState, PoolCandidates, ReplicaFacts
from policy_engine.core.pool.reports import MemberReport, count_changes, pool_inputs
from policy_engine.core.shared.draft import Draft, HoldNotes, Transition, note_clamps, note_events
from policy_engine.core.shared.vocabulary import VOLUNTARY, Clamp, ClampKind, DecisionKind, MemberKey, Rule
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import LifeCycle

RETRY_FIRST_S = 10.0
RETRY_MAX_S = 300.0
# A large pool may have one transition under way per so many GPUs.
GPUS_PER_TRANSITION = 32
# A loop is due a little early rather than a whole tick late. While windows come, they bring its rounds, and do not come
# to the moment: one that is new may be early, and a tick that other news brings does not take the place of one that is
# late by less than this. Windows of so many intervals ago do not come any more.
DUE_SLACK_S = 0.05
WINDOW_SLACK_S = 0.25
WINDOWS_GONE = 3.0


@dataclass(frozen=True, slots=True)
class Barred:
    """A replica whose transition failed: left alone until `until_s`, longer each time."""

    replica: str
    until_s: float
    failures: int


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A transition that the actuator works on: its operation, the rule behind it, and what it moves."""

    operation: str
    rule: Rule | None
    receivers: tuple[MemberKey, ...]
    donors: tuple[MemberKey, ...]
    replicas: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolState:
    """What a pool's next tick rests on beside its signals; kept in the store.

    `round` are the services that moved in a loop's round which may take further transitions, `round_slow` whether the
    slow loop is part of it.
    """

    members: tuple[MemberMemory, ...] = ()
    barred: tuple[Barred, ...] = ()
    fast_at_s: float | None = None
    slow_at_s: float | None = None
    notes: HoldNotes = ()
    # Urgent events that have been recorded as not served, with the time each was last seen.
    unserved: tuple[tuple[str, float], ...] = ()
    round: tuple[str, ...] = ()
    round_slow: bool = False

    def memory(self, key: MemberKey) -> MemberMemory:
        """What is known of `key`, or a blank."""
        return next((item for item in self.members if item.key == key), MemberMemory(key))


@dataclass(frozen=True, slots=True)
class PoolInput:
    """One tick's input, whole. `views` and `fronts` hold what was observed; an absent one was never observed.

    `unreachable` and `budget_unknown` are reasons why nothing may be decided: an actuator that does not answer, GPUs
    that cannot be read. `operations` are the transitions under way; a large pool may have several.
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
    # Replicas that the actuator is repairing.
    busy: tuple[str, ...] = ()
    operations: tuple[UnderWay, ...] = ()
    budget_unknown: str = ""


@dataclass(frozen=True, slots=True)
class PoolResult:
    """The next state and awake set, a report of every member, the draft of a decision, why the pool holds.

    `draft` is None when nothing is recorded. `preempt` is the reason to cancel the transition `preempt_operation`;
    empty when all go on.
    """

    state: PoolState
    awake: tuple[str, ...]
    reports: tuple[MemberReport, ...]
    draft: Draft | None
    holding: str = ""
    preempt: str = ""
    preempt_operation: str = ""


def decide_pool(given: PoolInput) -> PoolResult:
    """One tick of one pool."""
    operations = given.operations
    moving = {key for item in operations for key in (*item.receivers, *item.donors)}
    members, memories = look_at_members(
        PoolSnapshot(given.now_s, given.pool, given.policies, given.overlay, given.awake, given.replicas),
        dict(given.views),
        dict(given.fronts),
        {entry.key: entry for entry in given.state.members},
        moving,
    )
    state = replace(given.state, members=memories)
    candidates = _candidates(given, members, operations)
    reports = tuple(
        MemberReport(
            item.key,
            item.share,
            item.guard,
            candidates.awake_count(item.key),
            candidates.routable_count(item.key),
            item.load,
        )
        for item in members
    )
    if given.pool.metadata.paused:
        return _held(given, state, reports, ClampKind.PAUSED, "paused by an operator")
    if given.unreachable:
        return _held(given, state, reports, ClampKind.UNREACHABLE, given.unreachable)
    limit = _limit(given.pool)
    if len(operations) >= limit or any(not item.replicas for item in operations):
        holding = f"operation {', '.join(item.operation for item in operations)} is under way"
        operation, why = _preempts(operations, members) or _suffers(given, operations, members) or ("", "")
        return PoolResult(state, given.awake, reports, None, holding, why, operation)
    unread = given.budget_unknown or budget_unknown(given.overlay, given.replicas)
    if unread:
        return _held(given, state, reports, ClampKind.BUDGET_UNKNOWN, f"BudgetUnknown: {unread}")
    state, fast_due, slow_due = _loops(given, state)
    closed = {key.service for key in moving}.union(state.round)
    candidates = replace(candidates, members=tuple(_shut(item, closed) for item in members))
    verdict = arbitrate(candidates, fast_due=fast_due, slow_due=slow_due)
    state = _continued(given, state, verdict, more=len(operations) + 1 < limit, slow_due=slow_due)
    return _apply(given, state, members, reports, verdict)


def _candidates(given: PoolInput, members: tuple[MemberState, ...], operations: tuple[UnderWay, ...]) -> PoolCandidates:
    """The arbiter's input; replicas that share a GPU with a transition under way are barred."""
    moved = {name for item in operations for name in item.replicas}
    gpus: set[Gpu] = {gpu for item in given.overlay if item.replica in moved for gpu in item.gpus}
    beside = (item.replica for item in given.overlay if not gpus.isdisjoint(item.gpus))
    failed = (item.replica for item in given.state.barred if item.until_s > given.now_s)
    return PoolCandidates(
        overlay=given.overlay,
        awake=given.awake,
        members=members,
        replicas=given.replicas,
        residence_s=given.pool.spec.residence_s,
        barred=frozenset(failed).union(given.busy, beside),
        rules=given.pool.spec.rules,
    )


def _limit(pool: Pool) -> int:
    """How many transitions may be under way at a time."""
    return pool.spec.rules.max_transitions or max(1, pool.spec.budget_gpus // GPUS_PER_TRANSITION)


def _shut(member: MemberState, services: set[str]) -> MemberState:
    if member.key.service not in services:
        return member
    return replace(member, shut=f"{member.key.service} moves already")


def _loops(given: PoolInput, state: PoolState) -> tuple[PoolState, bool, bool]:
    """Which loops are due: by their intervals, or since their last round has transitions left.

    A round on a new window counts from the window's end: a tick that comes late does not skip the next round.
    """
    newest_s = max((view.window_end_s for _, view in given.views if view.window_end_s is not None), default=None)
    new = newest_s is not None and _has_new_window(given)
    round_s = min(given.now_s, newest_s) if new and newest_s is not None else given.now_s

    def due(last_s: float | None, interval_s: float) -> bool:
        if last_s is None or given.now_s < last_s:
            return True
        slack_s = WINDOW_SLACK_S if new else DUE_SLACK_S
        if not new and newest_s is not None and given.now_s - newest_s < WINDOWS_GONE * interval_s:
            slack_s = -WINDOW_SLACK_S
        return round_s - last_s >= interval_s - max(-interval_s / 2, min(slack_s, interval_s / 2))

    fast_due = due(given.state.fast_at_s, given.pool.spec.rescue_interval_s)
    slow_due = due(given.state.slow_at_s, given.pool.spec.rebalance_interval_s)
    if not (fast_due or slow_due):
        return state, bool(state.round), bool(state.round) and state.round_slow
    state = replace(
        state,
        fast_at_s=round_s if fast_due else state.fast_at_s,
        slow_at_s=round_s if slow_due else state.slow_at_s,
        round=(),
        round_slow=False,
    )
    return state, fast_due, slow_due


def _continued(given: PoolInput, state: PoolState, verdict: Verdict, *, more: bool, slow_due: bool) -> PoolState:
    """The round stays open for services that have not moved in it, while more transitions may be under way."""
    if verdict.transition is None:
        return replace(state, round=(), round_slow=False)
    changes = (*verdict.transition.releases, *verdict.transition.wakes)
    moved = tuple(sorted({*state.round, *(change.service for change in changes)}))
    if not more or len(moved) >= len({entry.service for entry in given.pool.spec.members}):
        return replace(state, round=(), round_slow=False)
    return replace(state, round=moved, round_slow=slow_due)


def _preempts(operations: tuple[UnderWay, ...], members: tuple[MemberState, ...]) -> tuple[str, str] | None:
    """The voluntary move that gives way to a hard-guard breach of another member's, and why; others go on."""
    receivers = {key for item in operations for key in item.receivers}
    for member in members:
        if not member.guard.hard or not member.share.demand or member.key in receivers:
            continue
        for item in operations:
            if item.rule in VOLUNTARY:
                return item.operation, f"{member.key}: {member.guard.hard}"
    return None


def _suffers(
    given: PoolInput, operations: tuple[UnderWay, ...], members: tuple[MemberState, ...]
) -> tuple[str, str] | None:
    """The transition whose donor passes a guard while its replica still drains: that one is given back.

    A voluntary move ends at the limit that would have vetoed the donor. Of a rescue the receiver is worse off, so there
    it takes the donor's hard limit. Queues and KV caches are judged by the actuator, at each of its looks.
    """
    draining = {item.replica for item in given.replicas if item.life_cycle == LifeCycle.DRAINING}
    for item in operations:
        if draining.isdisjoint(item.replicas):
            continue
        for member in members:
            broken = member.guard.soft if item.rule in VOLUNTARY else member.guard.hard
            if broken and member.key in item.donors and member.share.demand:
                return item.operation, f"{member.key}, which gives: {broken}"
    return None


def _has_new_window(given: PoolInput) -> bool:
    """Whether some member has a window that no tick has used yet."""
    return any(
        view.window_end_s is not None and view.window_end_s != given.state.memory(key).share.window_end_s
        for key, view in given.views
    )


def _held(
    given: PoolInput, state: PoolState, reports: tuple[MemberReport, ...], kind: ClampKind, detail: str
) -> PoolResult:
    """Nothing moves, with one record of why."""
    count = float(len(given.awake))
    clamp = Clamp(kind, count, count, detail)
    notes, new = note_clamps(state.notes, (clamp,), given.now_s)
    draft = None
    if new:
        draft = Draft(DecisionKind.HOLD, given.pool.name, Rule.HOLD, f"keeps its awake set: {detail}", clamps=(clamp,))
    return PoolResult(replace(state, notes=notes), given.awake, reports, draft, detail)


def _apply(
    given: PoolInput,
    state: PoolState,
    members: tuple[MemberState, ...],
    reports: tuple[MemberReport, ...],
    verdict: Verdict,
) -> PoolResult:
    notes, new_clamps = note_clamps(state.notes, verdict.clamps, given.now_s)
    state = replace(state, notes=notes)
    if verdict.transition is None:
        draft = None
        unserved, new_events = note_events(state.unserved, verdict.unserved, given.now_s)
        state = replace(state, unserved=unserved)
        if (new_clamps and verdict.holding) or new_events:
            draft = Draft(
                DecisionKind.HOLD,
                given.pool.name,
                Rule.HOLD,
                verdict.holding,
                inputs=pool_inputs(dict(given.views), dict(given.fronts), reports),
                clamps=verdict.clamps,
                candidates=verdict.candidates,
            )
        return PoolResult(state, given.awake, reports, draft, verdict.holding)
    transition = verdict.transition
    awake = after(given.awake, transition)
    counts = {item.key: (item.awake, item.routable) for item in reports}
    state = replace(state, members=note_move(state.members, members, counts, transition, given.now_s))
    draft = Draft(
        DecisionKind.TRANSITION,
        given.pool.name,
        verdict.rule,
        verdict.reason,
        inputs=pool_inputs(dict(given.views), dict(given.fronts), reports),
        clamps=verdict.clamps,
        counts=count_changes(reports, transition),
        transition=transition,
        candidates=verdict.candidates,
    )
    return PoolResult(state, awake, reports, draft)


def after(awake: tuple[str, ...], transition: Transition) -> tuple[str, ...]:
    """The awake set after `transition`."""
    released = {change.replica for change in transition.releases}
    woken = {change.replica for change in transition.wakes}
    return tuple(sorted((set(awake) - released) | woken))


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
