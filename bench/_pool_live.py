"""The demo's pool as processes, with Trimtab deciding: the live part of ``bench.agreement --demo``.

The scaled service of the demo is left out: it shares no GPU with the pool, but would share its CPUs.
"""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from lab.commands.demo import BRING_UP_SCALE, all_decisions
from lab.commands.demo_resources import expected_replicas, resources_of_pass
from simulator.replay.client import ReplayOptions, replay
from simulator.traces.demo import DemoTrace, stream_interval_for
from simulator.traces.model import TraceRequest
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.cli.addresses import LocalAddresses
from trimtab.cli.connect import PAGE_SIZE
from trimtab.cli.local import LocalStack, wait_until
from trimtab.cli.up import RunningStack, apply_when_up, running
from trimtab.config.resources import Resource
from trimtab.domain.time import seconds_of
from trimtab.views.text import message_dict

BRING_UP_TIMEOUT_S = 180.0
SETTLE_S = 6.0
"""Until windows hold nothing of the bring-up, as on virtual time."""


@dataclass(frozen=True, kw_only=True)
class LiveRun:
    """One run as it was: every request's latencies, every decision and operation, and how loaded the machine was."""

    began_s: float
    """When the trace began, from the last whole second on: where between two beats."""
    requests: list[dict[str, Any]]
    sent_late_max_s: float
    transition_s: list[float]
    """How long each transition took that succeeded, from its operation's beginning to its last step's end."""
    decisions: list[dict[str, Any]]
    operations: list[dict[str, Any]]
    started_unix_s: float
    load_average: tuple[float, float]

    @classmethod
    def read(cls, path: Path) -> "LiveRun":
        """As `write` left it."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(self.__dict__) + "\n")


async def live_run(
    made: DemoTrace,
    requests: Sequence[TraceRequest],
    resources: Sequence[Resource],
    *,
    phase_s: float,
    folder: Path,
    port: int,
) -> LiveRun:
    """`requests` of `made` in real time from `phase_s` after a whole second on.

    Raises CommandError for a stack that does not come up, RuntimeError when a request was lost or a process died.
    """
    stack = LocalStack(
        addresses=LocalAddresses(port_base=port),
        state_folder=folder,
        scenario="demo",
        bring_up_scale=BRING_UP_SCALE,
        stream_interval=stream_interval_for(made.peak_output_tps),
        log_level="warning",
    )
    given = resources_of_pass(resources, made.static_replicas(), made.mean_demand, static=False)
    before = os.getloadavg()[0]
    async with running(stack) as up:
        await apply_when_up(up.services, given)
        await _brought_up(up, given)
        await asyncio.sleep(SETTLE_S)
        await asyncio.sleep((phase_s - time.time()) % 1.0)
        options = ReplayOptions(url=stack.addresses.url("gateway"), seed=made.seed)
        report = await replay(requests, options, duration_s=made.duration_s)
        restarts = {name: count for name, count in sorted(up.supervisor.restarts.items()) if count}
        if restarts or report.lost:
            raise RuntimeError(f"a live run that says nothing: {len(report.lost)} requests lost, restarts {restarts}")
        operations = await _transitions(up)
        decisions = await all_decisions(up.services)
    return LiveRun(
        began_s=report.started_unix_s % 1.0,
        requests=[
            {
                "service": record.service,
                "arrival_s": record.arrival_s,
                "ttft_s": record.ttft_s,
                "tpot_s": record.tpot_s,
                "e2e_s": record.e2e_s,
            }
            for record in report.records
        ],
        sent_late_max_s=report.max_late_s,
        transition_s=[
            max(seconds_of(step.end_time) for step in one.steps) - seconds_of(one.create_time)
            for one in operations
            if one.state == actuator_pb2.OPERATION_STATE_SUCCEEDED
        ],
        decisions=[message_dict(one) for one in decisions],
        operations=[message_dict(one) for one in operations],
        started_unix_s=report.started_unix_s,
        load_average=(before, os.getloadavg()[0]),
    )


async def _brought_up(up: RunningStack, resources: Sequence[Resource]) -> None:
    """As many routable as the pool starts with, and nothing under way."""
    expected = {service: count for (service, _), count in expected_replicas(list(resources)).items()}

    async def missing() -> str:
        try:
            listed = await up.services.actuator.ListReplicas(actuator_pb2.ListReplicasRequest(), timeout=2.0)
            busy = await up.services.actuator.ListOperations(
                actuator_pb2.ListOperationsRequest(unfinished_only=True), timeout=2.0
            )
        except grpc.aio.AioRpcError as error:
            return error.details() or str(error.code())
        routable = {
            name: sum(one.routable for one in listed.replicas if one.service == name) for name in sorted(expected)
        }
        short = [f"{routable[name]} of {count} {name}" for name, count in expected.items() if routable[name] < count]
        return ", ".join(short) or ("the pool is being laid out" if busy.operations else "")

    await wait_until(missing, timeout_s=BRING_UP_TIMEOUT_S)


async def _transitions(up: RunningStack) -> list[actuator_pb2.Operation]:
    listed = await up.services.actuator.ListOperations(actuator_pb2.ListOperationsRequest(page_size=PAGE_SIZE))
    return [one for one in listed.operations if one.kind == actuator_pb2.OPERATION_KIND_TRANSITION]
