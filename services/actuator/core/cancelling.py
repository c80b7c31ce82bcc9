"""Cancelling an operation: rolled back where that is still possible."""

from actuator.core.fencing import refuse
from actuator.core.held import refuse_for, refused_operation
from actuator.core.model import Limits, Operation, OperationKind, OperationState, State
from actuator.core.operations import begin_rollback, keep
from actuator.core.reconcile import conclude_pools
from actuator.core.transaction import Transaction
from actuator.core.world import World


def cancel_operation(
    state: State, operation_id: str, reason: str, world: World, *, now_s: float, limits: Limits
) -> tuple[State, Operation]:
    """The new state and the operation. Raises ``Refused`` (NOT_FOUND, NOT_CANCELLABLE, RECORD_REFUSED).

    One that has ended, or is being rolled back, is returned as it is.
    """
    operation = state.operations.get(operation_id)
    refused = refused_operation(state, operation_id)
    if refused is not None:
        raise refuse_for(f"operation {operation_id} cannot be read", refused)
    if operation is None:
        raise refuse("NOT_FOUND", f"no operation {operation_id}")
    if operation.finished or operation.state is OperationState.ROLLING_BACK:
        return state, operation
    if operation.kind is OperationKind.OVERLAY:
        raise refuse("NOT_CANCELLABLE", f"{operation_id} brings up an overlay, which goes on: apply another pool state")
    d = Transaction(state, world, limits, now_s)
    blamed = d.held.operation(operation)
    if blamed is not None:
        raise refuse_for(f"operation {operation_id} is held", blamed)
    operation = keep(d, begin_rollback(d, operation, f"cancelled: {reason or 'no reason given'}", cancelled=True))
    conclude_pools(d)
    return d.commit(), operation
