"""The actuator process against a simulated fleet over real sockets: kills, a second actuator, gateways, placements."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tests.support.old_vllm import OldVllm
from trimtab.api.actuator.v1 import actuator_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.rpc.errors import error_reason, field_violations
from trimtab.store.embedded import EmbeddedStore

SWAPPED = {"chat-0": "sleeping", "chat-1": "sleeping", "code-0": "active", "code-1": "active"}
FENCING = types_pb2.Fencing(writer="prescheduler", token=1)


async def test_a_pool_is_brought_up_and_moves_capacity_once(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    assert await stack.life_cycles() == {
        "chat-0": "active",
        "chat-1": "sleeping",
        "code-0": "sleeping",
        "code-1": "active",
    }
    assert stack.fleet.awake() == {"node-0/0": ["chat-0"], "node-0/1": ["code-1"], "node-1/0": [], "node-1/1": []}

    response = await stack.apply(stack.pool_state(2, ["code-0", "code-1"]))
    operation = await stack.ended(response.operation.operation_id)
    assert operation.state == pb.OPERATION_STATE_SUCCEEDED, operation
    assert operation.kind == pb.OPERATION_KIND_TRANSITION
    assert operation.detail == "released chat-0; woke code-0"
    assert stack.fleet.awake()["node-0/0"] == ["code-0"]
    routable = {name for name, replica in (await stack.replicas()).items() if replica.routable}
    assert routable == {"code-0", "code-1"}


async def test_servers_that_slept_without_their_weights_have_them_before_they_are_shown(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()
    response = await stack.until(
        lambda: stack.apply(stack.pool_state(1, ["chat-0", "code-1"], sleep_level=2)), what="an accepted pool state"
    )
    assert (await stack.ended(response.operation.operation_id)).state == pb.OPERATION_STATE_SUCCEEDED
    response = await stack.apply(stack.pool_state(2, ["code-0", "code-1"], sleep_level=2))
    operation = await stack.ended(response.operation.operation_id)
    assert operation.state == pb.OPERATION_STATE_SUCCEEDED, operation
    assert await stack.life_cycles() == SWAPPED
    services = stack.fleet.ask("/stats")["services"].values()
    assert sum(stats["requests_received"] for stats in services) >= 3, "canary tokens came"
    assert sum(stats["requests_received_without_weights"] for stats in services) == 0


@pytest.mark.parametrize("phase", ["falling asleep", "waking"])
async def test_sigkill_in_the_middle_of_a_transition_is_recovered(stack: Any, phase: str) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    response = await stack.apply(stack.pool_state(2, ["code-0", "code-1"]))
    operation_id = response.operation.operation_id

    async def reached() -> bool:
        operation = await stack.operation(operation_id)
        return any(phase in step.phase for step in operation.steps) or operation.state > 2

    await stack.until(reached, what=phase)
    stack.processes.kill("actuator")
    stack.start_actuator(name="actuator-2")
    operation = await stack.ended(operation_id, timeout_s=10.0)
    assert operation.state == pb.OPERATION_STATE_SUCCEEDED, operation
    assert await stack.life_cycles() == SWAPPED
    listed = await stack.stub.ListOperations(pb.ListOperationsRequest(), timeout=3)
    kinds = [found.kind for found in listed.operations]
    assert kinds.count(pb.OPERATION_KIND_TRANSITION) == 1, "no double transition"
    assert sum(stats["requests_received_while_asleep"] for stats in stack.fleet.ask("/stats")["services"].values()) == 0


async def test_sigkill_of_the_store_leaves_endpoints_and_goes_on(stack: Any, own_store: EmbeddedStore) -> None:
    stack.store_url = own_store.url
    stack.start_fleet()
    stack.start_actuator("--lease-ttl-s", "1.5")
    await stack.bring_up()
    before = await _first_endpoints(stack)
    own_store.kill()
    await asyncio.sleep(2.5)  # Longer than its lease.
    during = await _first_endpoints(stack)
    assert during.services == before.services, "the last endpoints are served without the store"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.apply(stack.pool_state(2, ["code-0", "code-1"]))
    assert (caught.value.code(), error_reason(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
    own_store.start()

    async def applied() -> pb.ApplyPoolStateResponse:
        return await stack.apply(stack.pool_state(2, ["code-0", "code-1"]))

    response = await stack.until(applied, timeout_s=10.0, what="an accepted state")
    assert (await stack.ended(response.operation.operation_id)).state == pb.OPERATION_STATE_SUCCEEDED
    assert await stack.life_cycles() == SWAPPED


async def test_sigkill_of_the_fleet_loses_no_replica_and_wakes_nobody_beside_another(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    stack.processes.kill("fleet")

    async def withdrawn() -> bool:
        return not any(replica.routable for replica in (await stack.replicas()).values())

    await stack.until(withdrawn, timeout_s=5.0, what="the withdrawal of dead servers")
    stack.start_fleet()

    async def recovered() -> bool:
        return {name for name, replica in (await stack.replicas()).items() if replica.routable} == {"chat-0", "code-1"}

    await stack.until(recovered, timeout_s=10.0, what="the awake set as it was")
    assert sorted(await stack.replicas()) == ["chat-0", "chat-1", "code-0", "code-1"]
    assert stack.fleet.awake() == {"node-0/0": ["chat-0"], "node-0/1": ["code-1"], "node-1/0": [], "node-1/1": []}


async def test_a_second_actuator_stands_by_and_takes_over(stack: Any, processes: Any, free_ports: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    other = type(stack)(processes, stack.store_url, free_ports(4))
    other.fleet = stack.fleet
    other.start_actuator(name="standby")
    try:
        await other.until(other.stands_by, what="the second one's word")
        await asyncio.sleep(0.5)
        assert await other.stands_by()
        processes.kill("actuator")

        async def speaks() -> bool:
            return len(await other.replicas()) == 4

        await other.until(speaks, timeout_s=10.0, what="the take-over")
        assert (await other.life_cycles())["chat-0"] == "active"
    finally:
        await other.close()


async def test_a_gateway_that_has_not_acknowledged_holds_a_release_up(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    first = await _first_endpoints(stack)
    beating = asyncio.create_task(_heartbeat(stack, revision=first.revision))
    try:
        response = await stack.apply(stack.pool_state(2, ["code-0", "code-1"], drain_timeout_s=30.0))
        operation_id = response.operation.operation_id

        async def waits() -> bool:
            return "waiting for gateway gateway-t" in (await stack.operation(operation_id)).steps[0].phase

        await stack.until(waits, what="the wait for the gateway")
        await asyncio.sleep(1.0)
        assert (await stack.life_cycles())["chat-0"] == "draining"
        now = await _first_endpoints(stack)
        states = {e.replica: e.state for s in now.services for e in s.endpoints}
        assert states == {
            "chat-0": pb.ENDPOINT_STATE_DRAINING,
            "code-1": pb.ENDPOINT_STATE_ROUTABLE,
        }
        assert now.revision > first.revision
        beating.cancel()
        beating = asyncio.create_task(_heartbeat(stack, revision=now.revision, in_flight={"chat-0": 1}))

        async def drains() -> bool:
            return "1 in flight" in (await stack.operation(operation_id)).steps[0].phase

        await stack.until(drains, what="the drain")
        beating.cancel()
        beating = asyncio.create_task(_heartbeat(stack, revision=now.revision))
        assert (await stack.ended(operation_id)).state == pb.OPERATION_STATE_SUCCEEDED
    finally:
        beating.cancel()


async def test_of_two_gateways_one_that_does_not_confirm_blocks_the_sleep_and_not_the_fleet(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator("--acknowledge-timeout-s", "3")
    await stack.bring_up()
    good, stuck = _Gateway(stack, "gateway-good"), _Gateway(stack, "gateway-stuck")
    tasks = [asyncio.create_task(gateway.run()) for gateway in (good, stuck)]
    try:
        await stack.until(lambda: _both_route(good, stuck), what="the gateways' first sets")
        stuck.confirms = False
        response = await stack.apply(stack.pool_state(2, ["code-0", "code-1"]))
        operation_id = response.operation.operation_id

        async def waits() -> bool:
            return "waiting for gateway gateway-stuck" in (await stack.operation(operation_id)).steps[0].phase

        await stack.until(waits, what="the wait for the gateway")
        # Meanwhile the rest of the fleet moves: a group is placed, made, proved and shown.
        placed = await place(stack, group("g", ("node-1", 0)))
        operation = await stack.ended(operation_id)
        assert operation.state == pb.OPERATION_STATE_ROLLED_BACK
        assert "gateway gateway-stuck did not confirm for 3 s that it is hidden" in operation.detail
        made = await stack.ended(placed.results[0].operation_id)
        assert made.state == pb.OPERATION_STATE_SUCCEEDED
        routable = {name for name, replica in (await stack.replicas()).items() if replica.routable}
        assert routable == {"chat-0", "code-1", "g-node-1-0"}, "nobody is left hidden, nobody slept"
        assert good.states()["g-node-1-0"] == pb.ENDPOINT_STATE_ROUTABLE
        assert "chat-0" not in good.asleep_while_routed
        stuck.confirms = True
        response = await stack.apply(stack.pool_state(3, ["code-0", "code-1"], decision_id="d-1-2"))
        assert (await stack.ended(response.operation.operation_id)).state == pb.OPERATION_STATE_SUCCEEDED
        # Dead, it is waited for as long as its lease.
        tasks[1].cancel()
        response = await stack.apply(stack.pool_state(4, ["chat-0", "code-1"], decision_id="d-1-3"))
        assert (await stack.ended(response.operation.operation_id)).state == pb.OPERATION_STATE_SUCCEEDED
        assert not good.asleep_while_routed
        assert not stuck.asleep_while_routed
    finally:
        for task in tasks:
            task.cancel()


class _Gateway:
    """A gateway's two calls. While it does not confirm it renews its lease by the set that it had."""

    def __init__(self, stack: Any, name: str) -> None:
        self._stack, self._name = stack, name
        self.confirms = True
        self.newest = self.applied = pb.WatchEndpointsResponse()
        self.asleep_while_routed: set[str] = set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._acknowledge())

    async def _watch(self) -> None:
        async for message in self._stack.stub.WatchEndpoints(pb.WatchEndpointsRequest(gateway=self._name)):
            self.newest = message

    async def _acknowledge(self) -> None:
        while True:
            self.applied = self.newest if self.confirms else self.applied
            request = pb.AcknowledgeEndpointsRequest(gateway=self._name, revision=self.applied.revision)
            await self._stack.stub.AcknowledgeEndpoints(request, timeout=3)
            await self._look()
            await asyncio.sleep(0.1)

    async def _look(self) -> None:
        """Who sleeps although this gateway routes to it."""
        life_cycles = await self._stack.life_cycles()
        routed = {name for name, state in self.states().items() if state == pb.ENDPOINT_STATE_ROUTABLE}
        self.asleep_while_routed |= {name for name in routed if life_cycles.get(name) == "sleeping"}

    def states(self) -> dict[str, int]:
        """What it routes by."""
        return {endpoint.replica: endpoint.state for service in self.applied.services for endpoint in service.endpoints}


async def _both_route(*gateways: _Gateway) -> bool:
    return all(gateway.states() for gateway in gateways)


async def test_given_servers_that_answer_wrongly_or_not_at_all_are_named_and_the_rest_serves(
    stack: Any, serve: Callable[..., Any], free_port: int
) -> None:
    good, hung, lying = OldVllm(), OldVllm(), OldVllm()
    hung.hang = {"/health"}
    lying.finish_reason = "abort"
    addresses = {
        "good": await serve(good.handle),
        "hung": await serve(hung.handle),
        "lying": await serve(lying.handle),
        "dead": f"http://127.0.0.1:{free_port}",
    }
    groups = [
        {"targets": [address.removeprefix("http://")], "labels": {"service": "chat", "replica": name}}
        for name, address in addresses.items()
    ]
    targets = stack.processes.folder / "targets.json"
    targets.write_text(json.dumps(groups))
    stack.start_actuator("--backend", "static", "--targets-file", str(targets), "--probe-timeout-s", "1")

    async def good_is_shown() -> bool:
        return {name for name, replica in (await stack.replicas()).items() if replica.routable} == {"good"}

    await stack.until(good_is_shown, what="the good server")

    async def others_are_named() -> bool:
        found = await stack.replicas()
        operations = (await stack.stub.ListOperations(pb.ListOperationsRequest(), timeout=3)).operations
        why = {name: replica.detail for name, replica in found.items()}
        failed = {o.subject: o.detail for o in operations if o.state == pb.OPERATION_STATE_FAILED}
        return (
            "did not answer within 1 s" in why.get("hung", "")
            and "Connect call failed" in why.get("dead", "")
            and "gives no token" in failed.get("lying", "")
        )

    await stack.until(others_are_named, what="the reasons")
    states = await stack.life_cycles()
    assert (states["hung"], states["dead"], states["lying"]) == ("unknown", "failed", "starting")


async def test_a_pool_of_given_servers_takes_up_who_is_listed_and_nobody_else(
    stack: Any, serve: Callable[..., Any]
) -> None:
    labels = {"node": "node-0", "replica": "chat-0", "service": "chat", "gpu_indices": "0"}
    address = (await serve(OldVllm().handle)).removeprefix("http://")
    targets = stack.processes.folder / "targets.json"
    targets.write_text(json.dumps([{"targets": [address], "labels": labels}]))
    stack.start_actuator("--backend", "static", "--targets-file", str(targets))

    async def listed() -> bool:
        return "chat-0" in await stack.replicas()

    await stack.until(listed, what="the listed server")
    assert (await stack.stub.ListReplicas(pb.ListReplicasRequest(), timeout=3)).fixed
    state = stack.pool_state(1, [])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.apply(state)
    assert (caught.value.code(), error_reason(caught.value)) == (grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_REPLICA")
    assert "chat-1 (chat colocated on node-0 GPU 1)" in caught.value.details()
    assert "overlay[].replica" in caught.value.details()
    kept = [item for item in state.overlay if item.replica == "chat-0"]
    del state.overlay[:]
    state.overlay.extend(kept)
    response = await stack.apply(state)
    assert response.state_revision == 1
    assert (await stack.replicas())["chat-0"].pool == "main"
    targets.write_text("[]")
    state.state_revision = 2
    assert (await stack.apply(state)).state_revision == 2, "one that the pool had is no reason to refuse it"


async def test_a_targets_file_that_cannot_be_used_ends_the_start_with_one_line(stack: Any) -> None:
    targets = stack.processes.folder / "targets.json"
    targets.write_text('[{"targets": ["nowhere"]}]')
    stack.start_actuator("--backend", "static", "--targets-file", str(targets))
    assert await asyncio.to_thread(stack.processes.running["actuator"].wait, 20) == 1
    lines = stack.processes.log("actuator").splitlines()
    assert lines[-1] == f"actuator: {targets}: [0].targets[0]: 'nowhere' must be host:port"


async def _heartbeat(stack: Any, *, revision: int, in_flight: dict[str, int] | None = None) -> None:
    items = [pb.ReplicaInFlight(replica=name, requests=count) for name, count in (in_flight or {}).items()]
    while True:
        request = pb.AcknowledgeEndpointsRequest(gateway="gateway-t", revision=revision, in_flight=items)
        await stack.stub.AcknowledgeEndpoints(request, timeout=3)
        await asyncio.sleep(0.2)


async def _first_endpoints(stack: Any) -> pb.WatchEndpointsResponse:
    stream = stack.stub.WatchEndpoints(pb.WatchEndpointsRequest(gateway="gateway-t"))
    try:
        async for message in stream:
            return message
    finally:
        stream.cancel()
    raise AssertionError("no endpoints came")


def group(name: str, *gpus: tuple[str, int], remove: int = 0) -> scheduler_pb2.GroupPlacement:
    """Colocated replicas of one GPU each, or ``remove`` of them."""
    add = [
        scheduler_pb2.ReplicaPlacement(
            replica=f"{name}-{node}-{gpu}",
            role=types_pb2.ROLE_COLOCATED,
            node=node,
            gpu_indices=[gpu],
            model="dsllama-8b",
            profile="a100-8b-tp1",
            gpu_type="A100-40GB",
        )
        for node, gpu in gpus
    ]
    taken = [scheduler_pb2.ScaleIn(role=types_pb2.ROLE_COLOCATED, count=remove)] if remove else []
    return scheduler_pb2.GroupPlacement(
        group=name, service="chat", cluster="local", add=add, remove=taken, decision_id="d-2-1"
    )


async def place(stack: Any, *groups: scheduler_pb2.GroupPlacement, **fields: Any) -> pb.ApplyPlacementsResponse:
    """ApplyPlacements on the newest inventory."""
    nodes = await stack.stub.ListNodes(pb.ListNodesRequest(), timeout=3)
    values = {"inventory_revision": nodes.inventory_revision, "fencing": FENCING, **fields}
    return await stack.stub.ApplyPlacements(pb.ApplyPlacementsRequest(groups=groups, **values), timeout=5)


async def free_gpus(stack: Any) -> dict[str, int]:
    response = await stack.stub.ListNodes(pb.ListNodesRequest(), timeout=3)
    return dict(zip(response.nodes.nodes, response.nodes.free_gpu_masks, strict=True))


async def test_a_group_is_placed_shown_and_scaled_in(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()

    async def nodes_known() -> bool:
        return await free_gpus(stack) == {"node-0": 0b11, "node-1": 0b11}

    await stack.until(nodes_known, what="the nodes")
    placed = await place(stack, group("g", ("node-0", 0), ("node-1", 1)), request_id="r-1")
    assert placed.results[0].accepted, placed
    assert await free_gpus(stack) == {"node-0": 0b10, "node-1": 0b01}, "bound at once, before the servers exist"
    again = await place(stack, group("g", ("node-0", 0), ("node-1", 1)), request_id="r-1")
    assert again.results[0].operation_id == placed.results[0].operation_id
    created = await stack.ended(placed.results[0].operation_id)
    assert (created.state, created.kind) == (pb.OPERATION_STATE_SUCCEEDED, pb.OPERATION_KIND_CREATE)
    replicas = await stack.replicas()
    assert {name: (r.deployment_group, r.routable) for name, r in replicas.items()} == {
        "g-node-0-0": ("g", True),
        "g-node-1-1": ("g", True),
    }
    labels = stack.fleet.ask("/replicas")["replicas"][0]["labels"]
    assert labels == {"trimtab.dev/group": "g", "trimtab.dev/decision": "d-2-1"}
    removed = await place(stack, group("g", remove=1))
    gone = await stack.ended(removed.results[0].operation_id)
    assert (gone.state, gone.kind) == (pb.OPERATION_STATE_SUCCEEDED, pb.OPERATION_KIND_SCALE_IN)
    assert list(await stack.replicas()) == ["g-node-1-1"]
    assert len(stack.fleet.ask("/replicas")["replicas"]) == 1


async def test_a_group_that_cannot_be_made_as_a_whole_leaves_nothing(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()

    async def nodes_known() -> bool:
        return len(await free_gpus(stack)) == 2

    await stack.until(nodes_known, what="the nodes")
    wrong = group("g", ("node-0", 0), ("node-0", 1))
    wrong.add[1].profile = "no-such-profile"
    placed = await place(stack, wrong)
    operation = await stack.ended(placed.results[0].operation_id)
    assert operation.state == pb.OPERATION_STATE_ROLLED_BACK
    assert "no-such-profile" in operation.detail
    assert await stack.replicas() == {}
    assert stack.fleet.ask("/replicas")["replicas"] == []


async def test_writes_that_may_not_be_made_are_refused_with_a_reason(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    refusals: list[tuple[grpc.StatusCode, str]] = []

    async def refused(call: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        refusals.append((caught.value.code(), error_reason(caught.value)))

    await stack.apply(stack.pool_state(1, ["chat-0", "code-1"]), token=5)
    await refused(stack.apply(stack.pool_state(2, ["chat-0", "code-1"]), token=4))
    expired = stack.pool_state(3, ["chat-0", "code-1"])
    expired.expire_time.FromSeconds(1_000_000)
    await refused(stack.apply(expired, token=5))
    await refused(stack.apply(stack.pool_state(4, ["chat-0", "code-0"]), token=5))
    await refused(place(stack, group("g", ("node-1", 0)), inventory_revision=1))
    await refused(stack.apply(stack.pool_state(5, ["chat-0"], budget_gpus=0), token=5))
    failed = grpc.StatusCode.FAILED_PRECONDITION
    assert refusals == [
        (failed, "FENCED_OFF"),
        (failed, "EXPIRED"),
        (failed, "GPU_TWICE"),
        (failed, "OUTDATED_INVENTORY"),
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    ]
    denied = await place(stack, group("g", ("node-0", 1)))
    assert (denied.results[0].accepted, denied.results[0].detail) == (False, "g-node-0-1: GPU node-0/1 is not free")


async def test_a_write_whose_caller_goes_is_done_whole_or_not_at_all(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    nodes = await stack.stub.ListNodes(pb.ListNodesRequest(), timeout=3)
    # The last caller waits for its answer, however slow the machine is.
    for timeout_s in (*(0.0005 * attempt for attempt in range(30)), 10.0):
        request = pb.ApplyPlacementsRequest(
            groups=[group("g", ("node-1", 0))],
            inventory_revision=nodes.inventory_revision,
            fencing=FENCING,
            request_id="r",
        )
        told: pb.ApplyPlacementsResponse | None = None
        with contextlib.suppress(grpc.aio.AioRpcError):
            told = await stack.stub.ApplyPlacements(request, timeout=timeout_s)
    before = {item.operation_id for item in (await stack.stub.ListOperations(pb.ListOperationsRequest())).operations}
    assert told is not None
    assert told.results[0].accepted
    stack.processes.kill("actuator")
    stack.start_actuator(name="actuator-2")

    async def listed() -> set[str]:
        return {item.operation_id for item in (await stack.stub.ListOperations(pb.ListOperationsRequest())).operations}

    after = await stack.until(listed, what="the next actuator")
    assert after == before
    assert len(after) == 2, "the overlay's and one for the group"


async def test_nonsense_is_refused_by_field(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    foreign = group("g", ("node-0", 0))
    foreign.cluster = "elsewhere"
    escaping = group("g", ("node-0", 0))
    escaping.add[0].replica = "../nodes"
    escaping.add[0].profile = "p\n"
    twice = [pb.ReplicaInFlight(replica="chat-0", requests=1, pinned=2)] * 2
    state = stack.pool_state(9, ["chat-0"])
    state.floors.add(service="chat", role=types_pb2.ROLE_COLOCATED)
    state.floors.add(service="chat", role=types_pb2.ROLE_COLOCATED)
    refusals = [
        (place(stack, foreign), {"groups[0].cluster"}),
        (place(stack, escaping), {"groups[0].add[0].replica", "groups[0].add[0].profile"}),
        (stack.apply(state), {"state.floors"}),
        (
            stack.stub.AcknowledgeEndpoints(pb.AcknowledgeEndpointsRequest(gateway="w", in_flight=twice), timeout=3),
            {"in_flight[0].pinned", "in_flight[1].pinned", "in_flight"},
        ),
        (
            stack.stub.ListReplicas(pb.ListReplicasRequest(page_size=10_001, service="\n"), timeout=3),
            {"service", "page_size"},
        ),
        (stack.stub.ListOperations(pb.ListOperationsRequest(page_token="o-1"), timeout=3), {"page_token"}),
        (stack.stub.GetOperation(pb.GetOperationRequest(), timeout=3), {"operation_id"}),
    ]
    for call, fields in refusals:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert {item.field for item in field_violations(caught.value)} == fields


async def test_operations_are_listed_page_by_page_newest_first(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    response = await stack.apply(stack.pool_state(2, ["code-0", "code-1"]))
    await stack.ended(response.operation.operation_id)
    whole = await stack.stub.ListOperations(pb.ListOperationsRequest(), timeout=3)
    paged: list[str] = []
    token = ""
    while True:
        page = await stack.stub.ListOperations(pb.ListOperationsRequest(page_size=1, page_token=token), timeout=3)
        paged += [operation.operation_id for operation in page.operations]
        token = page.next_page_token
        if not token:
            break
    assert paged == [operation.operation_id for operation in whole.operations]
    assert len(paged) == 2


async def test_a_revision_that_was_never_published_proves_nothing(stack: Any) -> None:
    stack.start_fleet()
    stack.start_actuator()
    await stack.bring_up()
    given = pb.ReplicaInFlight(replica="127.0.0.1:8000", requests=1)
    lie = pb.AcknowledgeEndpointsRequest(gateway="gateway-t", revision=2**63, in_flight=[given])
    await stack.stub.AcknowledgeEndpoints(lie, timeout=3)
    response = await stack.apply(stack.pool_state(2, ["code-0", "code-1"]))

    async def waits() -> bool:
        await stack.stub.AcknowledgeEndpoints(lie, timeout=3)
        operation = await stack.operation(response.operation.operation_id)
        return any("gateway-t" in step.phase for step in operation.steps)

    await stack.until(waits, what="a release that waits for the gateway")
    assert await waits()
