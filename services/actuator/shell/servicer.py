"""ActuatorService over gRPC: parse, hand to the controller, translate back."""

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from actuator.core.admission_placement import apply_placements
from actuator.core.admission_pool import apply_pool_state
from actuator.core.cancelling import cancel_operation
from actuator.core.fencing import Refused
from actuator.core.held import held, refuse_for, refused_operation
from actuator.core.model import Limits, Operation, State
from actuator.core.placement_exchange import node_columns
from actuator.core.world import World
from actuator.shell import codec
from actuator.shell.controller import Controller
from actuator.shell.metrics import ActuatorMetrics
from actuator.shell.publisher import Publisher
from actuator.shell.refusals import error_of, refused_to_proto
from actuator.shell.routing import StreamRouting
from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.api.actuator.v1 import actuator_pb2_grpc
from trimtab.domain.inventory import columns_to_proto
from trimtab.rpc.errors import NotFound, Unavailable
from trimtab.rpc.validate import Violations

_Context = Any
T = TypeVar("T")

DEFAULT_PAGE_SIZE = 1000
MAX_PAGE_SIZE = 10_000


class ActuatorServicer(actuator_pb2_grpc.ActuatorServiceServicer):
    """All methods. A write that the core refuses becomes FAILED_PRECONDITION with its reason, or UNAVAILABLE (held)."""

    def __init__(
        self,
        controller: Controller,
        publisher: Publisher,
        routing: StreamRouting,
        metrics: ActuatorMetrics,
        *,
        cluster: str,
        limits: Limits,
        now_s: Callable[[], float],
        can_create: bool,
    ) -> None:
        self._controller = controller
        self._publisher = publisher
        self._routing = routing
        self._metrics = metrics
        self._cluster = cluster
        self._limits = limits
        self._can_create = can_create
        self._now_s = now_s

    async def ListReplicas(self, request: pb.ListReplicasRequest, context: _Context) -> pb.ListReplicasResponse:
        """By name; filtered by service and pool. The page token is the last name of the page before."""
        v = Violations()
        v.bounded_string("service", request.service, max_length=63, required=False)
        v.bounded_string("pool", request.pool, max_length=63, required=False)
        v.bounded_string("page_token", request.page_token, max_length=codec.MAX_GIVEN_NAME, required=False)
        size = _page_size(v, request.page_size)
        v.raise_if_any()
        state = self._controller.state
        names = [
            name
            for name in sorted(state.replicas)
            if name > request.page_token
            and request.service in ("", state.replicas[name].spec.service)
            and request.pool in ("", state.replicas[name].spec.pool)
        ]
        page = names[:size]
        return pb.ListReplicasResponse(
            replicas=[self._publisher.replica(state.replicas[name]) for name in page],
            revision=state.meta.replica_revision,
            next_page_token=page[-1] if len(names) > size else "",
            cluster=self._cluster,
            fixed=not self._can_create,
            refused=[refused_to_proto(record) for record in state.refused],
        )

    async def WatchReplicas(
        self, request: pb.WatchReplicasRequest, context: _Context
    ) -> AsyncIterator[pb.WatchReplicasResponse]:
        """Snapshot, changes, bookmarks."""
        self._controller.require_serving()
        async for message in self._publisher.watch_replicas():
            yield message

    async def ListNodes(self, request: pb.ListNodesRequest, context: _Context) -> pb.ListNodesResponse:
        """Packed columns of what new scaled replicas may take. UNAVAILABLE while that is not known."""
        state, world = self._controller.state, self._controller.world()
        blocked = held(state, world)
        blamed = blocked.everything or blocked.unknown_gpus
        if blamed is not None:
            raise error_of(refuse_for("GPUs may be taken that are not known", blamed))
        return pb.ListNodesResponse(
            nodes=columns_to_proto(node_columns(state, world)),
            cluster=self._cluster,
            inventory_revision=state.meta.inventory_revision,
        )

    async def ApplyPlacements(
        self, request: pb.ApplyPlacementsRequest, context: _Context
    ) -> pb.ApplyPlacementsResponse:
        """Each group as a whole or not at all."""
        parsed = codec.parse_placements(request, cluster=self._cluster)

        def apply(state: State, world: World, now_s: float) -> tuple[State, pb.ApplyPlacementsResponse]:
            answer = apply_placements(state, parsed, world, now_s=now_s, limits=self._limits)
            results = [codec.outcome_to_proto(outcome) for outcome in answer.results]
            return answer.state, pb.ApplyPlacementsResponse(results=results)

        return await self._change(apply)

    async def ApplyPoolState(self, request: pb.ApplyPoolStateRequest, context: _Context) -> pb.ApplyPoolStateResponse:
        """The pool's absolute desired state."""
        parsed = codec.parse_pool_state(request)
        if self._controller.world().listed is None:
            raise Unavailable("NO_INVENTORY", "the backend has not answered yet")

        def apply(state: State, world: World, now_s: float) -> tuple[State, pb.ApplyPoolStateResponse]:
            answer = apply_pool_state(
                state, parsed, world, now_s=now_s, limits=self._limits, can_create=self._can_create
            )
            operation = None
            if answer.operation is not None:
                operation = self._publisher.operation(answer.operation)
            return answer.state, pb.ApplyPoolStateResponse(state_revision=answer.state_revision, operation=operation)

        return await self._change(apply)

    async def GetOperation(self, request: pb.GetOperationRequest, context: _Context) -> pb.GetOperationResponse:
        """One operation."""
        v = Violations()
        v.bounded_string("operation_id", request.operation_id, max_length=128)
        v.raise_if_any()
        state = self._controller.state
        operation = state.operations.get(request.operation_id)
        refused = refused_operation(state, request.operation_id)
        if refused is not None:
            raise error_of(refuse_for(f"operation {request.operation_id} cannot be read", refused))
        if operation is None:
            raise NotFound("NOT_FOUND", f"no operation {request.operation_id!r}")
        return pb.GetOperationResponse(operation=self._publisher.operation(operation))

    async def ListOperations(self, request: pb.ListOperationsRequest, context: _Context) -> pb.ListOperationsResponse:
        """Newest first. The page token is the place of the last one, which may be forgotten meanwhile."""
        v = Violations()
        v.bounded_string("decision_id", request.decision_id, max_length=128, required=False)
        before = _parse_place(v, request.page_token)
        size = _page_size(v, request.page_size)
        v.raise_if_any()
        operations = sorted(
            self._controller.state.operations.values(), key=lambda o: (o.create_s, o.operation_id), reverse=True
        )
        shown = [
            operation
            for operation in operations
            if request.decision_id in ("", operation.decision_id)
            and not (request.unfinished_only and operation.finished)
            and (before is None or (operation.create_s, operation.operation_id) < before)
        ]
        page = shown[:size]
        return pb.ListOperationsResponse(
            operations=[self._publisher.operation(operation) for operation in page],
            next_page_token=_place(page[-1]) if len(shown) > size else "",
        )

    async def WatchOperations(
        self, request: pb.WatchOperationsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchOperationsResponse]:
        """Snapshot, changes, bookmarks."""
        self._controller.require_serving()
        async for message in self._publisher.watch_operations():
            yield message

    async def CancelOperation(
        self, request: pb.CancelOperationRequest, context: _Context
    ) -> pb.CancelOperationResponse:
        """Rolls back where that is still possible."""
        v = Violations()
        v.bounded_string("operation_id", request.operation_id, max_length=128)
        v.bounded_string("reason", request.reason, max_length=500, required=False)
        v.raise_if_any()

        def cancel(state: State, world: World, now_s: float) -> tuple[State, pb.CancelOperationResponse]:
            new, operation = cancel_operation(
                state, request.operation_id, request.reason, world, now_s=now_s, limits=self._limits
            )
            message = self._publisher.operation(operation)
            return new, pb.CancelOperationResponse(operation=message)

        return await self._change(cancel)

    async def WatchEndpoints(
        self, request: pb.WatchEndpointsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchEndpointsResponse]:
        """Whole sets. Watching starts the gateway's lease; acknowledging renews it."""
        name = _gateway_name(request.gateway)
        self._controller.require_serving()
        async for message in self._routing.watch(name, lease_until_s=self._now_s() + self._limits.gateway_lease_s):
            yield message

    async def AcknowledgeEndpoints(
        self, request: pb.AcknowledgeEndpointsRequest, context: _Context
    ) -> pb.AcknowledgeEndpointsResponse:
        """By which revision a gateway routes, and what it still has on replicas that are not routable."""
        newest = self._controller.state.meta.endpoint_revision
        now_s = self._now_s()
        said = codec.parse_gateway(request, lease_until_s=now_s + self._limits.gateway_lease_s, newest_revision=newest)
        self._routing.take_acknowledgement(said, sequence=request.sequence, now_s=now_s)
        return pb.AcknowledgeEndpointsResponse(current_revision=newest)

    async def _change(self, function: Callable[[State, World, float], tuple[State, T]]) -> T:
        try:
            return await self._controller.change(function)
        except Refused as error:
            self._metrics.refused.labels(error.reason).inc()
            raise error_of(error) from error


def _gateway_name(name: str) -> str:
    v = Violations()
    v.bounded_string("gateway", name, max_length=128)
    v.raise_if_any()
    return name


def _page_size(v: Violations, asked: int) -> int:
    v.require("page_size", asked <= MAX_PAGE_SIZE, f"may be at most {MAX_PAGE_SIZE}")
    return asked or DEFAULT_PAGE_SIZE


def _place(operation: Operation) -> str:
    return f"{operation.create_s.hex()} {operation.operation_id}"


def _parse_place(v: Violations, token: str) -> tuple[float, str] | None:
    if not token:
        return None
    created, _, operation_id = token.partition(" ")
    try:
        return float.fromhex(created), operation_id
    except (ValueError, OverflowError):
        v.add("page_token", "is not one that this method gave")
        return None
