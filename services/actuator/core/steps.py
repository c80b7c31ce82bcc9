"""What every step shares: how it succeeds, fails, tries again, and when its replica has nothing in flight any more.

Functions take the draft and the step and give the new step back; the draft holds the replica's record.
"""

from dataclasses import replace

from actuator.core.endpoints import gateway_requests, unaware
from actuator.core.model import ActionKind, Operation, OperationKind, OperationState, Replica, Step
from actuator.core.transaction import Transaction


def phase(step: Step, text: str) -> Step:
    """The step with another description of its phase."""
    return step if step.phase == text else replace(step, phase=text)


def succeed(d: Transaction, step: Step, text: str) -> Step:
    """It reached its goal; one that was being rolled back is rolled back."""
    rolling_back = step.state is OperationState.ROLLING_BACK
    state = OperationState.ROLLED_BACK if rolling_back else OperationState.SUCCEEDED
    return replace(step, state=state, phase=text, asked=None, end_s=d.now_s)


def fail(d: Transaction, step: Step, error: str) -> Step:
    """The step failed. The action that was asked for stays in its record, since it may have taken effect."""
    return replace(step, state=OperationState.FAILED, phase="failed", detail=error, end_s=d.now_s)


def retry(d: Transaction, step: Step, error: str, *, permanent: bool = False) -> Step:
    """Once more after a back-off, a bounded number of times."""
    attempts = step.attempts + 1
    if permanent or attempts >= d.limits.max_attempts:
        return fail(d, replace(step, attempts=attempts), error)
    backoff_s = min(d.limits.max_backoff_s, d.limits.backoff_s * 2.0 ** (attempts - 1))
    return replace(
        step, attempts=attempts, not_before_s=d.now_s + backoff_s, phase="waiting to try again", detail=error
    )


def forget_request(step: Step) -> Step:
    """Nothing is asked of the shell any more."""
    return replace(step, asked=None)


def outstanding(d: Transaction, step: Step) -> bool:
    """The shell is still acting on the replica; nothing else may be asked."""
    return step.replica in d.world.busy


def drain_timeout_s(d: Transaction, operation: Operation) -> float:
    """How long the operation lets in-flight requests end by themselves."""
    pool = d.pools.get(operation.subject)
    # A pre-warming is not urgent: its donor's requests end by themselves where they can.
    hurried = operation.kind is not OperationKind.PREWARM
    if hurried and pool is not None and pool.drain_timeout_s > 0:
        return pool.drain_timeout_s
    return d.limits.default_drain_s


def drained(d: Transaction, step: Step, replica: Replica) -> tuple[Step, bool]:
    """Whether the replica has no request in flight and gets no more.

    First every leased gateway must have acknowledged a revision that hides it; then the gateways must count nothing
    on it and a look at the server *after* that moment must show running + waiting = 0. What cannot be read is not
    zero.
    """
    gateways = d.leased_gateways()
    missing = unaware(replica, gateways)
    if missing:
        step = replace(step, acknowledged_s=0.0, unaware_s=step.unaware_s or d.now_s)
        return phase(step, f"hiding: waiting for gateway {', '.join(missing)}"), False
    if step.acknowledged_s == 0.0:
        step = replace(step, acknowledged_s=d.now_s, unaware_s=0.0)
    requests, pinned = gateway_requests(replica.name, gateways)
    probe = d.probe(replica.name)
    if probe is None or probe.as_of_s <= step.acknowledged_s:
        return phase(step, "draining: waiting for a look at the server"), False
    if probe.in_flight is None:
        return phase(step, f"draining: its in-flight count cannot be read ({probe.error or 'no such metric'})"), False
    if requests == 0 and probe.in_flight == 0:
        return step, True
    word = f"draining: {max(requests, probe.in_flight)} in flight"
    return phase(step, word + (f", {pinned} pinned" if pinned else "")), False


def past_deadline(d: Transaction, step: Step, replica: Replica) -> Step | None:
    """At the drain deadline gateways are to reissue requests; later the release is given up. None: go on waiting.

    The wait for a live gateway that does not acknowledge is short: it keeps one replica awake and delays nothing else.
    A sleep that was asked for must happen before it can be rolled back: that is not given up.
    """
    if step.state is not OperationState.ROLLING_BACK:
        given_up = _give_up(d, step)
        if given_up is not None:
            return given_up
    if d.now_s >= step.drain_deadline_s and not replica.evicting:
        d.keep(replace(replica, evicting=True))
    return None


def _give_up(d: Transaction, step: Step) -> Step | None:
    if step.unaware_s > 0.0 and d.now_s - step.unaware_s >= d.limits.acknowledge_s:
        text = step.phase.removeprefix("hiding: waiting for ")
        return fail(d, step, f"given up: {text} did not confirm for {d.limits.acknowledge_s:.0f} s that it is hidden")
    if d.now_s >= step.give_up_s:
        return fail(d, step, f"given up: {step.phase} {d.now_s - step.start_s:.0f} s after it began")
    return None


def told_to_sleep(d: Transaction, replica: Replica) -> bool:
    """Whether its server is, or may be, falling asleep, or has just refused to."""
    return replica.told_to_sleep is not None or d.outcome(replica.name, ActionKind.SLEEP) is not None


def asked(step: Step, kind: ActionKind, text: str) -> Step:
    """Writes down what the shell is about to do."""
    return replace(step, asked=kind, phase=text)
