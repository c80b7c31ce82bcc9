"""Passive transitions: events outside, taken into the records. Withdraws a dead server at once.

Limits: a look proves something only about the time after the record's last change, and nothing about a replica that
the shell is acting on. An outcome proves something only about the record as it stood when the action was asked
for. A server that refuses connections is FAILED; one that is silent becomes UNKNOWN after several looks; a starting one
may do both until its time-out. A paused server answers ``/is_sleeping`` with true while its memory is in use: it is
neither asleep nor serving.
"""

from collections.abc import Iterable
from dataclasses import replace

from actuator.core import holds
from actuator.core.gpu_occupancy import exited, occupies, sharing
from actuator.core.lifecycle import timeout_s
from actuator.core.model import ActionKind, Replica
from actuator.core.sleeping import fall_asleep, level_of_sleeper
from actuator.core.transaction import Transaction
from actuator.core.world import Listed, Outcome, ProbeResult, RunState
from trimtab.domain.vocabulary import HoldOwner, LifeCycle

_START_TIME_TOLERANCE_S = 0.5
_GONE = "the backend does not list it"


def observe(d: Transaction) -> None:
    """Brings every record up to what was seen."""
    # A held replica counts as owned, too: its record names the owner, once it can be read again.
    claimed = d.claimed().keys() | d.held_replicas()
    if d.world.listed is not None:
        for name in sorted(d.world.listed):
            if name not in d.replicas and name not in d.held.replicas:
                _adopt(d, d.world.listed[name])
        for name in sorted(d.replicas):
            _compare_listing(d, d.replicas[name], d.world.listed.get(name), claimed=name in claimed)
    for name in sorted(d.replicas):
        _compare_probe(d, d.replicas[name])
    for name in sorted(d.replicas):
        _expire(d, d.replicas[name], claimed=name in claimed)


def apply_outcomes(d: Transaction, outcomes: Iterable[Outcome]) -> None:
    """Take in outcomes of actions. One whose replica has changed its state since then counts as lost.

    Every action may be lost and is asked for again, so that is always safe; the outcome of another process, or of an
    action that an earlier operation asked for, is not.
    """
    for outcome in outcomes:
        replica = d.replicas.get(outcome.replica)
        action = outcome.action
        if replica is not None and action is not None and action.since_s != replica.since_s:
            continue
        d.outcomes[outcome.replica] = outcome
        if replica is None or outcome.kind is not ActionKind.SLEEP:
            continue
        if outcome.ok:
            fall_asleep(d, replica, d.claimed().get(replica.name, "slept"))
        elif _settled(d, replica, outcome):
            d.keep(replace(replica, told_to_sleep=None))


def _settled(d: Transaction, replica: Replica, outcome: Outcome) -> bool:
    """Whether a sleep that failed will not happen any more.

    A refusal settles its own call. An earlier one may be under way for as long as a request is in flight that it waits
    for, or until all attempts would have timed out.
    """
    earlier = outcome.action is not None and outcome.action.repeated
    if outcome.unsettled or not earlier:
        return not outcome.unsettled
    told = replica.told_to_sleep
    return (
        not outcome.busy and told is not None and d.now_s - told.since_s > d.limits.max_attempts * d.limits.sleeping_s
    )


def start_again(d: Transaction, replica: Replica, detail: str) -> Replica:
    """Awake and unproved: hidden until a canary token comes."""
    replica = d.move(replica, LifeCycle.STARTING, detail)
    replica = replace(replica, since_s=d.now_s, ready=False, detail=detail)
    return d.keep(holds.put(replica, HoldOwner.START_UP, reason=detail, now_s=d.now_s))


def as_new(replica: Replica) -> Replica:
    """The record of a new process: it has never slept, its first sleep is slow, and it got no request yet."""
    return replace(replica, slept_once=False, sleep_level=0, told_to_sleep=None)


def _adopt(d: Transaction, listed: Listed) -> None:
    """A replica without a record: given as a target, or its record was lost with the store."""
    probe = d.probe(listed.spec.replica)
    if probe is None and listed.run_state is RunState.RUNNING:
        return
    replica = Replica(
        spec=listed.spec,
        placement=listed.placement,
        life_cycle=LifeCycle.STARTING,
        since_s=d.now_s,
        cause="found",
        address=listed.address,
        start_time_s=listed.start_time_s,
    )
    d.notes.append(f"{replica.name}: found without a record")
    replica = d.hold(replica, HoldOwner.START_UP, "found")
    if listed.run_state is RunState.EXITED:
        d.move(replica, LifeCycle.FAILED, "its process has ended")
    elif probe is not None and not probe.healthy and listed.run_state is RunState.RUNNING:
        # One made here that runs and does not listen counts as starting: it may be waiting for memory.
        if not (probe.refused and _made_here(listed)):
            found = LifeCycle.FAILED if probe.refused else LifeCycle.UNKNOWN
            d.move(replica, found, probe.error or "does not answer")
    elif probe is not None and probe.healthy and probe.sleeping and not probe.paused:
        fall_asleep(d, replica, "found asleep")
    elif probe is not None and probe.healthy and probe.paused:
        # It may be falling asleep: it stops its scheduler first, and gives its memory up last.
        d.move(replica, LifeCycle.UNKNOWN, "paused by another hand, or falling asleep")
    elif probe is not None and probe.healthy and _was_serving(d, listed, probe):
        d.keep(holds.lift(d.move(replica, LifeCycle.ACTIVE), HoldOwner.START_UP))


def _was_serving(d: Transaction, listed: Listed, probe: ProbeResult) -> bool:
    """Trimtab made it, so it was serving when the record was lost: taking it away would change a count."""
    if not _made_here(listed) or probe.error:
        return False
    return not any(occupies(other, d.world) for other in sharing(listed.placed, d.replicas))


def _made_here(listed: Listed) -> bool:
    return bool(listed.spec.pool or listed.spec.group)


def _compare_listing(d: Transaction, replica: Replica, listed: Listed | None, *, claimed: bool) -> None:
    if listed is None:
        _not_listed(d, replica, claimed=claimed)
        return
    if replica.address != listed.address:
        replica = d.keep(replace(replica, address=listed.address))
    before_s = replica.start_time_s
    if listed.start_time_s > 0 and abs(listed.start_time_s - before_s) > _START_TIME_TOLERANCE_S:
        replica = d.keep(replace(replica, start_time_s=listed.start_time_s))
        if before_s > 0 and replica.life_cycle is not LifeCycle.TERMINATING:
            replica = start_again(d, as_new(replica), "restarted")
    if listed.run_state is RunState.EXITED and replica.life_cycle not in (LifeCycle.FAILED, LifeCycle.TERMINATING):
        d.move(as_new(replica), LifeCycle.FAILED, "its process has ended")


def _not_listed(d: Transaction, replica: Replica, *, claimed: bool) -> None:
    being_made = replica.life_cycle is LifeCycle.STARTING and not replica.address and claimed
    if being_made or d.world.listed_as_of_s <= replica.since_s:
        return
    if replica.life_cycle is LifeCycle.TERMINATING:
        if not claimed:
            del d.replicas[replica.name]
    elif replica.life_cycle is not LifeCycle.FAILED:
        d.move(replica, LifeCycle.FAILED, _GONE)
    elif d.world.listed_as_of_s - replica.since_s >= d.limits.missing_grace_s:
        d.notes.append(f"{replica.name}: gone, {_GONE}")
        del d.replicas[replica.name]


def _compare_probe(d: Transaction, replica: Replica) -> None:
    probe = d.probe(replica.name)
    if probe is None or probe.as_of_s <= replica.since_s or replica.life_cycle is LifeCycle.TERMINATING:
        return
    if not probe.healthy:
        _no_answer(d, replica, probe)
    elif replica.life_cycle in (LifeCycle.FAILED, LifeCycle.UNKNOWN):
        if replica.detail != _GONE and not exited(replica, d.world) and not probe.paused:
            _came_back(d, replica, probe)
    elif replica.name not in d.world.busy:
        _compare_sleep(d, replica, probe)


def _no_answer(d: Transaction, replica: Replica, probe: ProbeResult) -> None:
    if replica.life_cycle is LifeCycle.STARTING:
        return
    if probe.refused and replica.life_cycle is not LifeCycle.FAILED:
        # Nothing listens: a server that answers there later was started meanwhile.
        d.move(as_new(replica), LifeCycle.FAILED, probe.error or "nothing listens at its address")
    elif probe.misses >= d.limits.misses_before_unknown and replica.life_cycle not in (
        LifeCycle.FAILED,
        LifeCycle.UNKNOWN,
    ):
        d.move(replica, LifeCycle.UNKNOWN, probe.error or "does not answer")


def _came_back(d: Transaction, replica: Replica, probe: ProbeResult) -> None:
    if probe.sleeping:
        fall_asleep(d, replica, "answers again, asleep")
    else:
        start_again(d, replica, "answers again")


def _compare_sleep(d: Transaction, replica: Replica, probe: ProbeResult) -> None:
    if probe.paused and replica.life_cycle is LifeCycle.ACTIVE:
        d.move(replica, LifeCycle.UNKNOWN, "paused by another hand")
    elif probe.sleeping and not probe.paused:
        if replica.life_cycle in (LifeCycle.ACTIVE, LifeCycle.DRAINING, LifeCycle.STARTING):
            fall_asleep(d, replica, "found asleep")
        elif replica.life_cycle is LifeCycle.SLEEPING and replica.sleep_level == 0:
            # Found before its pool was known again, which may let the next ones sleep at another level.
            d.keep(replace(replica, sleep_level=level_of_sleeper(d, replica)))
    elif probe.sleeping is not None and replica.life_cycle is LifeCycle.SLEEPING:
        start_again(d, replace(replica, sleep_level=level_of_sleeper(d, replica)), "found awake")


def _expire(d: Transaction, replica: Replica, *, claimed: bool) -> None:
    """Transient states that no operation answers for end by their time-out."""
    limit_s = timeout_s(replica.life_cycle, d.limits)
    if claimed or limit_s is None or d.now_s - replica.since_s <= limit_s:
        return
    waits_for_memory = any(occupies(other, d.world) for other in sharing(replica.placed, d.replicas))
    if replica.life_cycle is LifeCycle.STARTING and waits_for_memory:
        return
    if replica.life_cycle in (LifeCycle.STARTING, LifeCycle.REACTIVATING):
        d.move(replica, LifeCycle.FAILED, f"{replica.life_cycle} for more than {limit_s:.0f} s")
