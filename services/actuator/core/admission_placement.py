"""Whether placements are accepted: each group as a whole or not at all, on the inventory as it is now."""

from collections import Counter
from dataclasses import dataclass, replace

from actuator.core.fencing import check_expiry, check_token, refuse, remember_token
from actuator.core.gpu_occupancy import taken_gpus
from actuator.core.held import refuse_for
from actuator.core.model import (
    ActionKind,
    Goal,
    GroupOutcome,
    Limits,
    Operation,
    OperationKind,
    OperationState,
    PlacedSpec,
    Replica,
    State,
    Step,
    StepKind,
)
from actuator.core.operations import begin_rollback, keep
from actuator.core.transaction import Transaction
from actuator.core.world import World
from trimtab.domain.vocabulary import HoldOwner, LifeCycle, Role


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """What one cycle does to one Deployment Group."""

    group: str
    service: str
    add: tuple[PlacedSpec, ...]
    remove: tuple[tuple[Role, int], ...]
    decision_id: str


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """One call of ApplyPlacements."""

    groups: tuple[GroupRequest, ...]
    inventory_revision: int
    expire_s: float | None
    request_id: str
    validate_only: bool
    writer: str
    token: int


@dataclass(frozen=True, kw_only=True)
class PlacementAnswer:
    """The new state and what came of each group, in the order asked."""

    state: State
    results: tuple[GroupOutcome, ...]


def apply_placements(
    state: State, request: PlacementRequest, world: World, *, now_s: float, limits: Limits
) -> PlacementAnswer:
    """Accepts groups, or raises ``Refused`` for the call as a whole. A refused group is a result, not an error."""
    check_token(state.meta, request.writer, request.token)
    known = state.meta.requests.get(request.request_id) if request.request_id else None
    if known is not None and [item.group for item in known] != [group.group for group in request.groups]:
        raise refuse("REQUEST_ID_REUSED", f"request {request.request_id} was answered before for other groups")
    if known is not None:
        return PlacementAnswer(state=state, results=known)
    check_expiry(request.expire_s, now_s)
    if request.inventory_revision != state.meta.inventory_revision:
        raise refuse(
            "OUTDATED_INVENTORY",
            f"the placements rest on inventory revision {request.inventory_revision}, the newest is "
            f"{state.meta.inventory_revision}: list the nodes again",
            inventory_revision=str(state.meta.inventory_revision),
        )
    d = Transaction(state, world, limits, now_s)
    blamed = d.held.everything or d.held.unknown_gpus
    if blamed is not None:
        raise refuse_for("no placement is accepted, since GPUs may be taken that are not known", blamed)
    results = tuple(_apply_group(d, group, validate_only=request.validate_only) for group in request.groups)
    if request.validate_only:
        return PlacementAnswer(state=state, results=results)
    d.meta = remember_token(d.meta, request.writer, request.token)
    if request.request_id:
        kept = dict(list(d.meta.requests.items())[-(limits.keep_requests - 1) :])
        d.meta = replace(d.meta, requests={**kept, request.request_id: results})
    return PlacementAnswer(state=d.commit(), results=results)


def _apply_group(d: Transaction, group: GroupRequest, *, validate_only: bool) -> GroupOutcome:
    blamed = d.held.subject(group.group)
    if blamed is not None:
        return GroupOutcome(group=group.group, accepted=False, detail=f"the group is held: {blamed.text}")
    additions = [placed for placed in group.add if not _same_exists(d, placed)]
    problem = _problem_with(d, group, additions)
    taken_back, left = creations_to_take_back(d, group)
    victims: list[Replica] = []
    for role, count in group.remove:
        found = pick_victims(d, group.group, role, left[role])
        victims += found
        if len(found) < left[role]:
            can_leave = count - left[role] + len(found)
            problem = problem or f"the group has {can_leave} {role} replicas to remove, not {count}" + _busy(d, group)
    if problem:
        return GroupOutcome(group=group.group, accepted=False, detail=problem)
    for operation in taken_back:
        reason = f"taken back: the group is to be smaller by {group.decision_id or 'a newer decision'}"
        keep(d, begin_rollback(d, operation, reason, cancelled=True))
    steps = [
        *(
            Step(
                kind=StepKind.CREATE,
                goal=Goal.AWAKE,
                replica=placed.replica,
                service=placed.service,
                placed=placed,
                # Its record exists from the start, so the step has begun: a roll-back has to remove the record.
                state=OperationState.RUNNING,
                start_s=d.now_s,
                asked=ActionKind.CREATE,
                phase="creating",
            )
            for placed in additions
        ),
        *(
            Step(kind=StepKind.DELETE, goal=Goal.ABSENT, replica=victim.name, service=victim.spec.service)
            for victim in victims
        ),
    ]
    if not steps:
        last = taken_back[-1].operation_id if taken_back else ""
        text = f"takes {last} back" if last else "nothing to do"
        known = "" if validate_only else last
        return GroupOutcome(group=group.group, accepted=True, detail=text, operation_id=known)
    operation = _operation(d, group, steps)
    d.operations[operation.operation_id] = operation
    for placed in additions:
        # From here on no other replica gets these GPUs. The record has no address until the backend made the server.
        record = Replica(
            spec=placed.spec,
            placement=placed.placement,
            life_cycle=LifeCycle.STARTING,
            since_s=d.now_s,
            cause="placed",
        )
        d.hold(record, HoldOwner.START_UP, operation.operation_id)
    if validate_only:
        return GroupOutcome(group=group.group, accepted=True, detail="would be placed")
    return GroupOutcome(group=group.group, accepted=True, operation_id=operation.operation_id)


def _same_exists(d: Transaction, placed: PlacedSpec) -> bool:
    record = d.replicas.get(placed.replica)
    return record is not None and _asked_for(record.placed) == _asked_for(placed)


def _asked_for(placed: PlacedSpec) -> PlacedSpec:
    """The fields that must be equal for a placement to be the same: a later decision may ask for it again."""
    return replace(placed, spec=replace(placed.spec, decision_id="", gpu_type=""))


def _problem_with(d: Transaction, group: GroupRequest, additions: list[PlacedSpec]) -> str:
    """Why the group cannot be placed; empty when it can."""
    taken = taken_gpus(d.replicas, d.claimed_gpus(), d.world)
    doubled = [gpu for gpu, times in Counter(gpu for placed in additions for gpu in placed.gpus).items() if times > 1]
    if doubled:
        return f"GPU {doubled[0][0]}/{doubled[0][1]} is placed twice"
    names = Counter(placed.replica for placed in group.add)
    for placed in additions:
        node = d.world.nodes.get(placed.node)
        if names[placed.replica] > 1:
            return f"replica {placed.replica} is placed twice"
        if placed.replica in d.replicas or placed.replica in d.held.replicas:
            return f"replica {placed.replica} exists already"
        if node is None:
            return f"{placed.replica}: this cluster has no node {placed.node}"
        if placed.spec.gpu_type and placed.spec.gpu_type != node.gpu_type:
            return f"{placed.replica}: node {placed.node} has {node.gpu_type}, not {placed.spec.gpu_type}"
        for _, index in placed.gpus:
            if index >= node.gpus:
                return f"{placed.replica}: node {placed.node} has {node.gpus} GPUs, no GPU {index}"
            if (placed.node, index) in taken:
                return f"{placed.replica}: GPU {placed.node}/{index} is not free"
    return ""


def creations_to_take_back(d: Transaction, group: GroupRequest) -> tuple[list[Operation], dict[Role, int]]:
    """Creations under way of which no replica is wanted any more, newest first, and how many replicas still must leave.

    They leave before replicas that serve. A creation is rolled back as a whole or goes on: one of which a part is
    still wanted is finished first.
    """
    left = dict(group.remove)
    found = []
    for operation in reversed(list(d.unfinished())):
        creates_only = all(step.kind is StepKind.CREATE for step in operation.steps)
        if operation.subject != group.group or not creates_only or operation.state is OperationState.ROLLING_BACK:
            continue
        made = Counter(step.placed.role for step in operation.steps if step.placed is not None)
        if operation.kind is OperationKind.CREATE and all(left.get(role, 0) >= count for role, count in made.items()):
            found.append(operation)
            left = {role: count - made[role] for role, count in left.items()}
    return found, left


def _busy(d: Transaction, group: GroupRequest) -> str:
    """Which operations have to end before more of the group can leave; empty when none has."""
    names = [operation.operation_id for operation in d.unfinished() if operation.subject == group.group]
    return f"; {', '.join(names)} must end first" if names else ""


def pick_victims(d: Transaction, group: str, role: Role, count: int) -> list[Replica]:
    """The replicas to remove: those that do not serve first, then the least loaded, then by name."""
    claimed = d.claimed()
    candidates = [
        replica
        for replica in d.replicas.values()
        if replica.spec.group == group
        and replica.spec.role is role
        and replica.name not in claimed
        and replica.life_cycle is not LifeCycle.TERMINATING
    ]

    def load(replica: Replica) -> tuple[bool, float, str]:
        probe = d.probe(replica.name)
        in_flight = probe.in_flight if probe is not None else None
        return replica.routable, float("inf") if in_flight is None else float(in_flight), replica.name

    return sorted(candidates, key=load)[:count]


def _operation(d: Transaction, group: GroupRequest, steps: list[Step]) -> Operation:
    creates = any(step.kind is StepKind.CREATE for step in steps)
    duration_s = d.limits.default_drain_s + d.limits.pinned_wait_s + d.limits.terminating_s
    return Operation(
        operation_id=d.next_operation_id(),
        kind=OperationKind.CREATE if creates else OperationKind.SCALE_IN,
        subject=group.group,
        create_s=d.now_s,
        update_s=d.now_s,
        deadline_s=d.now_s + duration_s + (d.limits.starting_s if creates else 0.0),
        decision_id=group.decision_id,
        steps=tuple(steps),
    )
