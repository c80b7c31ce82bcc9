"""Pre-warming by a real actuator process against a simulated fleet over real sockets."""

from typing import Any

from trimtab.api.actuator.v1 import actuator_pb2 as pb

FLAGS = ("--prewarm-after-s", "1", "--prewarm-backoff-s", "2")
AT_REST = {"chat-0": "active", "chat-1": "active", "code-0": "sleeping", "code-1": "sleeping"}


async def prewarms(stack: Any) -> list[pb.Operation]:
    """Oldest first."""
    response = await stack.stub.ListOperations(pb.ListOperationsRequest(), timeout=3)
    return [o for o in reversed(response.operations) if o.kind == pb.OPERATION_KIND_PREWARM]


async def while_one_serves_on_each_gpu(stack: Any, condition: Any) -> Any:
    """Awaits what ``condition`` gives; no GPU has two awake servers meanwhile."""

    async def look() -> Any:
        assert all(len(names) <= 1 for names in stack.fleet.awake().values()), stack.fleet.awake()
        return await condition()

    return await stack.until(look, timeout_s=60.0)


def started(stack: Any) -> dict[str, float]:
    return {item["replica"]: item["start_time"] for item in stack.fleet.ask("/replicas")["replicas"]}


async def test_a_server_that_crashed_beside_one_that_serves_is_warm_again_once_the_pool_asks_for_it(stack: Any) -> None:
    """And the actuator is killed while the one that serves there sleeps."""
    stack.start_fleet("--bring-up-scale", "0.04")
    stack.start_actuator(*FLAGS)
    state = stack.pool_state(1, ["chat-0", "chat-1"])
    response = await stack.until(lambda: stack.apply(state), what="an accepted pool state")
    assert (await stack.ended(response.operation.operation_id, timeout_s=60.0)).state == pb.OPERATION_STATE_SUCCEEDED

    before = started(stack)
    stack.fleet.fault("code-0", "crash")

    async def waits() -> bool:
        return started(stack)["code-0"] != before["code-0"] and (await stack.life_cycles())["code-0"] == "starting"

    await stack.until(waits, what="the crash")
    looks = 0

    async def waits_still() -> bool:
        nonlocal looks
        looks += 1
        assert await stack.life_cycles() == AT_REST | {"code-0": "starting"}
        assert await prewarms(stack) == []
        return looks > 40

    await stack.until(waits_still, what="two seconds in which nothing happens")

    await stack.apply(stack.pool_state(2, ["chat-0", "chat-1"], prewarm=True))

    async def begun() -> pb.Operation | None:
        found = await prewarms(stack)
        donor_sleeps = found and found[-1].steps[0].state == pb.OPERATION_STATE_SUCCEEDED
        return found[-1] if donor_sleeps else None

    operation = await while_one_serves_on_each_gpu(stack, begun)
    assert [(step.kind, step.replica) for step in operation.steps] == [
        (pb.STEP_KIND_RELEASE, "chat-0"),
        (pb.STEP_KIND_CREATE, "code-0"),
    ]
    stack.processes.kill("actuator")
    stack.start_actuator(*FLAGS)

    async def ended() -> pb.Operation | None:
        found = await stack.operation(operation.operation_id)
        return found if found.state == pb.OPERATION_STATE_SUCCEEDED else None

    assert (await while_one_serves_on_each_gpu(stack, ended)).detail == "pre-warmed code-0; chat-0 serves again"
    assert await stack.life_cycles() == AT_REST
    replicas = await stack.replicas()
    assert replicas["code-0"].slept_once
    assert replicas["chat-0"].routable
    assert not (await stack.stub.ListReplicas(pb.ListReplicasRequest(), timeout=3)).fixed
    after = started(stack)
    assert [name for name in before if before[name] != after[name]] == ["code-0"], "nobody else was started anew"
    assert len(await prewarms(stack)) == 1
