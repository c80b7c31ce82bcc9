"""The actuator process against a simulated fleet over real sockets."""

from typing import Any

from trimtab.api.actuator.v1 import actuator_pb2 as pb


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
