"""Whether a pool state is accepted, and what follows at once.

Refused: a fenced-off writer, an expired or older state, an exceeded budget or a GPU given twice, an awake set under a
floor, GPUs of another owner, a replica that does not exist where none can be made. The same state again gets the same
answer.
"""

from dataclasses import dataclass, replace

from actuator.core.fencing import check_expiry, check_token, refuse, remember_token
from actuator.core.held import refuse_for
from actuator.core.model import (
    Goal,
    Gpu,
    Limits,
    Operation,
    OperationKind,
    OperationState,
    PlacedSpec,
    Placement,
    Pool,
    Spec,
    State,
    Step,
    StepKind,
)
from actuator.core.operations import begin_rollback, keep
from actuator.core.prewarming import in_its_way, leave_to
from actuator.core.reconcile import open_pool_operation
from actuator.core.transaction import Transaction
from actuator.core.world import World
from trimtab.domain.pool import DesiredPool, settings_in


@dataclass(frozen=True, kw_only=True)
class PoolRequest:
    """A desired pool state as it came in, its writer and the writer's fencing token."""

    desired: DesiredPool
    writer: str
    token: int


@dataclass(frozen=True, kw_only=True)
class PoolAnswer:
    """The new state, and the operation that works towards the pool state."""

    state: State
    state_revision: int
    operation: Operation | None


def apply_pool_state(
    state: State, request: PoolRequest, world: World, *, now_s: float, limits: Limits, can_create: bool = True
) -> PoolAnswer:
    """Accepts or raises ``Refused``. Nothing is acted on here; the next tick does.

    ``can_create``: whether the backend can make the replicas of the overlay that do not exist.
    """
    d = Transaction(state, world, limits, now_s)
    desired = request.desired
    check_token(state.meta, request.writer, request.token)
    check_expiry(desired.expires_s, now_s)
    d.held.check_subject(desired.pool)
    current = state.pools.get(desired.pool)
    pool = _accepted(desired, current)
    if current is not None and desired.state_revision <= current.state_revision:
        return _repeated(d, current, pool, request)
    if desired.replica_revision > state.meta.replica_revision:
        raise refuse(
            "UNKNOWN_REVISION",
            f"the state rests on replica revision {desired.replica_revision}, the newest here is "
            f"{state.meta.replica_revision}: list the replicas again",
        )
    _check_shape(pool)
    if not can_create:
        _check_warms_itself(pool)
        _check_exist(pool, world, current)
    _check_held(d, pool, current)
    _check_owners(d, pool)
    d.meta = remember_token(d.meta, request.writer, request.token)
    if current is not None and _only_bounds_differ(current, pool):
        operation = _rebound(d, current, pool)
        return PoolAnswer(state=d.commit(), state_revision=pool.state_revision, operation=operation)
    d.pools[pool.pool] = pool
    _take_over(d, pool)
    _give_way(d, current, pool)
    contradicted = _retarget(d, pool)
    operation = open_pool_operation(d, pool, contradicted)
    new = d.commit()
    return PoolAnswer(state=new, state_revision=pool.state_revision, operation=operation)


def _repeated(d: Transaction, current: Pool, pool: Pool, request: PoolRequest) -> PoolAnswer:
    if pool.state_revision < current.state_revision:
        raise refuse(
            "OUTDATED",
            f"pool {current.pool} is at state revision {current.state_revision}, this one is {pool.state_revision}",
            state_revision=str(current.state_revision),
        )
    asked = replace(pool, decision_id=current.decision_id, operation_id=current.operation_id)
    if asked != current:
        raise refuse(
            "REVISION_REUSED",
            f"pool {current.pool}: state revision {current.state_revision} was applied before with another content",
            state_revision=str(current.state_revision),
        )
    d.meta = remember_token(d.meta, request.writer, request.token)
    operation = d.operations.get(current.operation_id)
    if operation is not None and operation.pool_revision != current.state_revision:
        operation = None
    return PoolAnswer(state=d.commit(), state_revision=current.state_revision, operation=operation)


def _only_bounds_differ(current: Pool, asked: Pool) -> bool:
    """The same decision for the same replicas, with other floors, budget or times."""
    same = (current.decision_id, current.overlay, current.awake) == (asked.decision_id, asked.overlay, asked.awake)
    return same and bool(asked.decision_id)


def _rebound(d: Transaction, current: Pool, asked: Pool) -> Operation | None:
    """New bounds begin nothing: the decision's operation goes on under the new revision.

    One that was rolled back is not tried again, or a change of a floor that comes meanwhile would do so.
    """
    operation = d.operations.get(current.operation_id)
    settled = current.settled_revision == current.state_revision
    if operation is not None and operation.pool_revision == current.state_revision:
        operation = keep(d, replace(operation, pool_revision=asked.state_revision))
    d.pools[asked.pool] = replace(
        asked,
        operation_id=current.operation_id,
        settled_revision=asked.state_revision if settled else current.settled_revision,
    )
    return operation


def _accepted(desired: DesiredPool, current: Pool | None) -> Pool:
    return Pool(
        pool=desired.pool,
        state_revision=desired.state_revision,
        overlay=specs_of(desired),
        awake=tuple(sorted(desired.awake)),
        floors=desired.floors,
        budget_gpus=desired.budget_gpus,
        decision_id=desired.decision_id,
        **settings_in(desired),
        effective_awake=current.effective_awake if current is not None else (),
        settled_revision=current.settled_revision if current is not None else 0,
    )


def specs_of(desired: DesiredPool) -> tuple[PlacedSpec, ...]:
    """Each replica of the overlay with its place, by name."""
    return tuple(
        PlacedSpec(
            spec=Spec(
                replica=item.replica,
                service=item.member.service,
                role=item.member.role,
                model=item.model,
                profile=item.profile,
                pool=desired.pool,
            ),
            placement=Placement(node=item.node, gpu_indices=item.gpu_indices),
        )
        for item in sorted(desired.overlay, key=lambda item: item.replica)
    )


def _check_shape(pool: Pool) -> None:
    entries = {placed.replica: placed for placed in pool.overlay}
    if len(entries) != len(pool.overlay):
        raise refuse("INVALID_POOL", f"pool {pool.pool}: the overlay names a replica twice")
    unknown = sorted(set(pool.awake) - entries.keys())
    if unknown:
        raise refuse("INVALID_POOL", f"pool {pool.pool}: {unknown[0]} is to be awake and is not in the overlay")
    users: dict[Gpu, str] = {}
    for name in sorted(set(pool.awake)):
        for gpu in entries[name].gpus:
            if gpu in users:
                raise refuse(
                    "GPU_TWICE",
                    f"pool {pool.pool}: {users[gpu]} and {name} are both to be awake on {gpu[0]}/{gpu[1]}",
                )
            users[gpu] = name
    if len(users) > pool.budget_gpus:
        raise refuse(
            "OVER_BUDGET",
            f"pool {pool.pool}: the awake set takes {len(users)} GPUs, the budget is {pool.budget_gpus}",
        )
    for floor in pool.floors:
        count = sum(
            1 for name in set(pool.awake) if (entries[name].service, entries[name].role) == (floor.service, floor.role)
        )
        if count < floor.min_replicas:
            raise refuse(
                "BELOW_FLOOR",
                f"pool {pool.pool}: {floor.service} {floor.role} would have {count} replicas awake, its floor is "
                f"{floor.min_replicas}",
            )


def _check_warms_itself(pool: Pool) -> None:
    if pool.prewarm:
        raise refuse(
            "PREWARM_UNSUPPORTED",
            f"pool {pool.pool}: replicas cannot be made and deleted here, so none can be pre-warmed: set the pool's "
            f"spec.prewarm to false",
        )


def _check_exist(pool: Pool, world: World, current: Pool | None) -> None:
    """Where nothing can be created, a replica is listed, or was when the pool took it up."""
    known = set(world.listed or ()) | {placed.replica for placed in (current.overlay if current is not None else ())}
    for placed in pool.overlay:
        if placed.replica not in known:
            gpus = ",".join(str(index) for index in placed.placement.gpu_indices)
            raise refuse(
                "UNKNOWN_REPLICA",
                f"there is no replica {placed.replica} ({placed.service} {placed.role} on {placed.node} GPU {gpus}), "
                f"and none can be created here: start its server and list it with that service, role, node and "
                f"gpu_indices, or give the member's overlay[].replica the name of one that is listed",
                replica=placed.replica,
            )


def _check_held(d: Transaction, pool: Pool, current: Pool | None) -> None:
    """Nothing of the overlay is held for a record that cannot be read, or might be."""
    had = current.gpus if current is not None else frozenset()
    for placed in pool.overlay:
        replica = d.replicas.get(placed.replica)
        blamed = d.held.placed(placed) or (d.held.replica(replica) if replica is not None else None)
        if blamed is not None:
            raise refuse_for(f"pool {pool.pool}: {placed.replica} is held", blamed)
        if d.held.unknown_gpus is not None and not had.issuperset(placed.gpus):
            raise refuse_for(f"pool {pool.pool}: GPUs of {placed.replica} may be taken", d.held.unknown_gpus)


def _check_owners(d: Transaction, pool: Pool) -> None:
    """Check that the overlay's nodes and GPUs exist and have no other owner, and that its names are not in use."""
    others = {gpu: other.pool for other in d.pools.values() if other.pool != pool.pool for gpu in other.gpus}
    scaled = {gpu: replica.name for replica in d.replicas.values() if replica.spec.group for gpu in replica.gpus}
    for placed in pool.overlay:
        node = d.world.nodes.get(placed.node)
        if d.world.nodes and node is None:
            raise refuse("UNKNOWN_NODE", f"{placed.replica}: this cluster has no node {placed.node}")
        for gpu in placed.gpus:
            if node is not None and gpu[1] >= node.gpus:
                raise refuse(
                    "UNKNOWN_GPU", f"{placed.replica}: node {placed.node} has {node.gpus} GPUs, no GPU {gpu[1]}"
                )
            owner = others.get(gpu) or scaled.get(gpu)
            if owner is not None:
                raise refuse("GPU_TAKEN", f"{placed.replica}: GPU {gpu[0]}/{gpu[1]} belongs to {owner}")
        record = d.replicas.get(placed.replica)
        if record is not None and (record.spec.group or record.spec.pool not in ("", pool.pool)):
            raise refuse(
                "NAME_TAKEN",
                f"{placed.replica} exists already in {record.spec.group or record.spec.pool}, not in this pool",
            )
        if record is not None and (record.spec.service, record.gpus) != (placed.service, placed.gpus):
            raise refuse(
                "NAME_TAKEN", f"{placed.replica} exists already as a replica of {record.spec.service} on other terms"
            )
        if record is not None and record.spec.pool != pool.pool:
            spec = replace(placed.spec, gpu_type=record.spec.gpu_type)
            d.keep(replace(record, spec=spec, placement=placed.placement))


def _take_over(d: Transaction, pool: Pool) -> None:
    """End operations on servers that belonged to no pool so far: from now on the pool decides which are awake.

    Each was to be shown by itself; two found awake on one GPU would wait for one another, and the pool for both.
    """
    names = {placed.replica for placed in pool.overlay}
    for operation in list(d.unfinished()):
        own = operation.atomic or operation.pool_revision > 0 or operation.subject == pool.pool
        if own or not names.issuperset(step.replica for step in operation.steps):
            continue
        steps = tuple(
            step
            if step.finished
            else replace(step, state=OperationState.CANCELLED, phase="taken over", asked=None, end_s=d.now_s)
            for step in operation.steps
        )
        detail = f"taken over by pool {pool.pool}"
        keep(d, replace(operation, state=OperationState.CANCELLED, steps=steps, detail=detail))


def _give_way(d: Transaction, before: Pool | None, pool: Pool) -> None:
    """A pre-warming that the newer state needs room of is taken back at once, and that state waits for no operation."""
    for operation in list(d.unfinished()):
        if operation.kind is not OperationKind.PREWARM or operation.subject != pool.pool or before is None:
            continue
        if operation.state is OperationState.ROLLING_BACK:
            keep(d, leave_to(operation, pool, d.now_s))
        elif in_its_way(operation, before, pool):
            reason = f"gave way to state revision {pool.state_revision}"
            keep(d, leave_to(begin_rollback(d, operation, reason, cancelled=True), pool, d.now_s))


def _retarget(d: Transaction, pool: Pool) -> tuple[str, ...]:
    """What the new state means for operations under way.

    A bring-up takes the new goals over. A transition that the new state contradicts is rolled back, and its id is given
    back: the new operation waits for it. Others go on.
    """
    awake = set(pool.awake)
    contradicted = []
    for operation in list(d.unfinished()):
        if operation.subject != pool.pool or (operation.pool_revision == 0 and operation.atomic):
            continue
        if operation.kind is OperationKind.OVERLAY:
            steps = tuple(_turned(step, awake) for step in operation.steps)
            keep(d, replace(operation, steps=steps))
            continue
        if operation.waits_for:
            keep(d, begin_rollback(d, operation, "overtaken by a newer state", cancelled=True))
            contradicted += list(operation.waits_for)
        elif operation.state is OperationState.ROLLING_BACK:
            contradicted.append(operation.operation_id)
        elif any((step.goal is Goal.AWAKE) != (step.replica in awake) for step in operation.steps):
            keep(d, begin_rollback(d, operation, f"overtaken by state revision {pool.state_revision}", cancelled=True))
            contradicted.append(operation.operation_id)
    return tuple(sorted(set(contradicted)))


def _turned(step: Step, awake: set[str]) -> Step:
    if step.finished or step.goal is Goal.ABSENT or step.kind is StepKind.DELETE:
        return step
    return replace(step, goal=Goal.AWAKE if step.replica in awake else Goal.ASLEEP)
