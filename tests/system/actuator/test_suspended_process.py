"""An actuator's process that was suspended for longer than its lease, and its successor."""

import signal
from typing import Any

from trimtab.api.actuator.v1 import actuator_pb2 as pb


async def test_a_suspended_process_stands_by_for_its_successor_and_comes_back_after_it(
    stack: Any, processes: Any, free_ports: Any
) -> None:
    stack.start_fleet()
    stack.start_actuator("--lease-ttl-s", "1")
    await stack.bring_up()
    before = await stack.life_cycles()
    processes.running["actuator"].send_signal(signal.SIGSTOP)
    other = type(stack)(processes, stack.store_url, free_ports(4))
    other.fleet = stack.fleet
    other.start_actuator("--lease-ttl-s", "1", name="successor")
    try:
        await other.until(other.replicas, what="the take-over")
        processes.running["actuator"].send_signal(signal.SIGCONT)
        await stack.until(stack.stands_by, what="the end of the first one's reign")
        processes.kill("successor")
        assert await stack.until(stack.life_cycles, what="the first one's return") == before
        response = await stack.apply(stack.pool_state(2, ["code-0", "code-1"]))
        assert (await stack.ended(response.operation.operation_id)).state == pb.OPERATION_STATE_SUCCEEDED
    finally:
        processes.running["actuator"].send_signal(signal.SIGCONT)
        await other.close()
