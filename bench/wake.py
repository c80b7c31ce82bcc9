"""How long from a step in demand to the call of `/wake_up`: ``python -m bench.wake --json``.

A local stack is started (all services, a gateway, simulated servers) with small pools of two kinds. In an *idle* pool
a service has one server awake and one asleep on an idle GPU. In a *donor* pool both other GPUs belong to a service that
is busy, with requests that outlive the drain: one has to be released, drained to its deadline, and put to sleep. A step
is a burst of requests to the first service, at a random moment against every clock of the stack; the call of `/wake_up`
is noted by the server that is woken. Between steps the pools are put back by their policies' bounds.

`--verbose` prints what happened in each step, by the records of the services, and `--json` holds it: when the first
window ended that shows the step, when it was written, decided on, taken and carried out; and how long each process
waited for a CPU meanwhile.

Bars: idle, at the 99th percentile one scrape interval plus one fast tick plus 100 ms; donor, that plus the pool's drain
time plus the sleep that the profile has measured. The stack shares the machine with whatever else runs there, so the
figures are good on a quiet machine only; the load average stands beside them.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import grpc
import yaml

from bench._wake_cells import DRAIN_S, FAST_S, NODE_GPUS, PROFILE, Cell, document
from bench._wake_timeline import Timeline, concerns, cpu_waits_s, decisions_of, stages_of, windows_of
from simulator.profiles import packaged_profiles
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.cli.addresses import LocalAddresses
from trimtab.cli.local import LocalStack, wait_until
from trimtab.cli.resources import apply_resources
from trimtab.cli.up import RunningStack, apply_when_up, running
from trimtab.cli_errors import CommandError
from trimtab.domain.time import seconds_of
from trimtab.store.client import Store

SCRAPE_S = 1.0
ALLOWANCE_S = 0.1
BURST = 24
"""Many, so that the first window shows them: a scrape that sees ten, after one that saw none, is one on average over a
window of five seconds. No more, since a busy machine takes its time to pass them on."""
BURST_TOKENS = 150
DONOR_REQUESTS = 3
DONOR_TOKENS = 400
BRING_UP_S = 120.0
STEP_TIMEOUT_S = 30.0
QUIET_S = 6.5
"""A window of five seconds, and a little: nothing of the last step is left in it."""
CALL_S = 5.0
CLOCKS_S = 0.25
"""The actuator writes its times by the store's clock, a server by its own: so far they may be apart."""
PROCESSES = ("store", "fleet", "collector", "policy", "actuator", "gateway")


@dataclass
class Measured:
    """All steps of one kind."""

    steps: list[Timeline] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, object]:
        """Percentiles of every stage, in seconds."""
        stages: dict[str, list[float]] = {
            "to_decision_s": [step.decided_s for step in self.steps],
            "to_operation_s": [step.accepted_s for step in self.steps],
            "to_release_s": [step.released_s for step in self.steps if step.released_s is not None],
            "to_wake_call_s": [step.called_s for step in self.steps],
        }
        return {
            "steps": len(self.steps),
            "missed": self.missed,
            **{name: percentiles(values) for name, values in stages.items() if values},
            "beyond_profile_s": {
                name: percentiles(values) for name, values in self.beyond_profile_s().items() if values
            },
            "wake_calls_s": [round(step.called_s, 3) for step in self.steps],
        }

    def beyond_profile_s(self) -> dict[str, list[float]]:
        """Seconds beyond what drain and profile say: of a release, from hidden to asleep; of a wake, from
        the call to the routable server. A release whose requests ended before the deadline is left out."""
        lifecycle = packaged_profiles()[PROFILE].lifecycle
        released = [
            stage.ended_s - stage.began_s - DRAIN_S - lifecycle.sleep_s
            for step in self.steps
            for stage in step.stages
            if stage.kind == "release" and stage.ended_s is not None
        ]
        woken = [
            step.routable_s - step.called_s - lifecycle.wake_s for step in self.steps if step.routable_s is not None
        ]
        return {"release": [value for value in released if value >= 0.0], "wake": woken}

    @property
    def p99_s(self) -> float | None:
        """Of the wake calls; None when a step brought none, which counts as infinitely late."""
        return None if self.missed or not self.steps else percentile([step.called_s for step in self.steps], 0.99)


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: the smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, p90, p99 and the largest."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(percentile(values, share), 3) for name, share in shares.items()}


@dataclass(frozen=True)
class Called:
    """A step's wake call, in Unix seconds, and how long each process waited for a CPU in between."""

    replica: str
    since_s: float
    called_s: float
    cpu_wait_s: dict[str, float]


class Bench:
    """The steps of one cell after the other, all cells side by side."""

    def __init__(self, up: RunningStack, http: aiohttp.ClientSession, store: Store, seed: int) -> None:
        self._services = up.services
        self._supervisor = up.supervisor
        self._addresses = up.stack.addresses
        self._http = http
        self._store = store
        self._seed = seed
        self._one_at_a_time = asyncio.Lock()
        self.measured = {"idle": Measured(), "donor": Measured()}

    async def run(self, cells: Sequence[Cell], steps: int) -> None:
        """`steps` of each kind."""
        each = math.ceil(steps / sum(cell.kind == "idle" for cell in cells))
        busy = [asyncio.create_task(self._keep_busy(cell.donor)) for cell in cells if cell.donor]
        try:
            await asyncio.gather(*(self._steps(cell, each) for cell in cells))
        finally:
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)

    async def _steps(self, cell: Cell, count: int) -> None:
        source = random.Random(f"{self._seed}/{cell.service}")
        for number in range(count):
            await self._put_back(cell)
            await asyncio.sleep(QUIET_S)
            await self._apply(cell, armed=True)
            # One at a time: bursts of all cells at once would measure how many a small machine can play.
            async with self._one_at_a_time:
                # At any moment against every clock.
                await asyncio.sleep(1.0 + source.random() * (SCRAPE_S + FAST_S))
                burst = asyncio.create_task(self._burst(cell.service))
                try:
                    called = await self._await_call(cell)
                except BaseException:
                    burst.cancel()
                    raise
            await burst
            measured = self.measured[cell.kind]
            if called is None:
                measured.missed.append(f"{cell.service}, step {number}: no wake within {STEP_TIMEOUT_S:g} s")
            else:
                measured.steps.append(await self._timeline(cell, called))

    async def _await_call(self, cell: Cell) -> Called | None:
        """The wake call that a step beginning now brings; None when it brings none in time."""
        since_s = time.time()
        before_s = cpu_waits_s(self._pids())
        give_up_s = time.monotonic() + STEP_TIMEOUT_S
        while time.monotonic() < give_up_s:
            for name, called_s in (await self._wake_calls(cell.service)).items():
                if called_s > since_s:
                    waits_s = cpu_waits_s(self._pids())
                    waits_s = {key: round(waits_s[key] - before_s[key], 3) for key in waits_s if key in before_s}
                    return Called(name, since_s, called_s, waits_s)
            await asyncio.sleep(0.1)
        return None

    def _pids(self) -> dict[str, int]:
        found = {name: self._supervisor.pid(name) for name in PROCESSES}
        return {name: pid for name, pid in found.items() if pid is not None} | {"bench": os.getpid()}

    async def _wake_calls(self, service: str) -> dict[str, float]:
        """Server → when `/wake_up` was called last."""
        async with self._http.get(self._addresses.url("fleet") + "/replicas") as reply:
            page = await reply.json()
        return {
            item["replica"]: item["wake_called_at"]
            for item in page["replicas"]
            if item["service"] == service and item["wake_called_at"] is not None
        }

    async def _operation(self, cell: Cell, called: Called) -> actuator_pb2.Operation:
        """The one that made the call, when it has ended or some seconds are over."""
        give_up_s = time.monotonic() + CALL_S
        while True:
            listed = await self._services.actuator.ListOperations(
                actuator_pb2.ListOperationsRequest(page_size=100), timeout=CALL_S
            )
            made_it = (
                item
                for item in listed.operations
                if item.subject == f"pool-{cell.service}"
                and called.since_s <= seconds_of(item.create_time) <= called.called_s + CLOCKS_S
                and any(step.replica == called.replica for step in item.steps)
            )
            found = next(made_it, None)
            if found is None:
                raise CommandError(f"no operation of pool-{cell.service} made the call to {called.replica}")
            ended = all(step.HasField("end_time") for step in found.steps)
            if ended or time.monotonic() > give_up_s:
                return found
            await asyncio.sleep(0.2)

    async def _timeline(self, cell: Cell, called: Called) -> Timeline:
        since_s = called.since_s
        operation = await self._operation(cell, called)
        reply = await self._services.policy.ListDecisions(
            policy_pb2.ListDecisionsRequest(page_size=200), timeout=CALL_S
        )
        decision = next(item for item in reply.decisions if item.decision_id == operation.decision_id)
        read = {"since_s": since_s, "until_s": called.called_s}
        pool = f"pool-{cell.service}"
        whole = [await self._whole(item) for item in reply.decisions if concerns(item, pool, **read)]
        return Timeline(
            cell=cell.service,
            decided_s=seconds_of(decision.decide_time) - since_s,
            accepted_s=seconds_of(operation.create_time) - since_s,
            called_s=called.called_s - since_s,
            windows=await windows_of(self._store, cell.service, **read),
            decisions=decisions_of(whole, pool, cell.service, **read),
            stages=stages_of(operation, since_s=since_s),
            cpu_wait_s=called.cpu_wait_s,
        )

    async def _whole(self, record: decision_pb2.Decision) -> decision_pb2.Decision:
        """A decision with its input, which lists leave out."""
        request = policy_pb2.ExplainDecisionRequest(decision_id=record.decision_id)
        return (await self._services.policy.ExplainDecision(request, timeout=CALL_S)).decision

    async def _apply(self, cell: Cell, *, armed: bool) -> None:
        await apply_resources(self._services, cell.resources(armed=armed))

    async def _put_back(self, cell: Cell) -> None:
        await self._apply(cell, armed=False)
        wanted = {cell.service: 1} | ({cell.donor: 2} if cell.donor else {})

        async def missing() -> str:
            return await self.missing(wanted)

        await wait_until(missing, timeout_s=60.0, poll_s=0.2)

    async def missing(self, wanted: Mapping[str, int]) -> str:
        """What is not as wanted: routable servers by service, and no operation under way on them."""
        try:
            reply = await self._services.actuator.ListReplicas(
                actuator_pb2.ListReplicasRequest(page_size=1000), timeout=CALL_S
            )
            busy = await self._services.actuator.ListOperations(
                actuator_pb2.ListOperationsRequest(unfinished_only=True), timeout=CALL_S
            )
        except grpc.aio.AioRpcError as error:
            return error.details() or str(error.code())
        found = dict.fromkeys(wanted, 0)
        for replica in reply.replicas:
            if replica.service in found:
                found[replica.service] += replica.routable
        moving = {step.service for operation in busy.operations for step in operation.steps}
        if moving.intersection(wanted):
            return f"{sorted(moving.intersection(wanted))} are moved"
        return "" if found == dict(wanted) else f"routable {found}, wanted {dict(wanted)}"

    async def _burst(self, service: str) -> None:
        await asyncio.gather(*(self._ask(service, f"{service} {number}", BURST_TOKENS) for number in range(BURST)))

    async def _keep_busy(self, service: str) -> None:
        async def one(number: int) -> None:
            turn = 0
            while True:
                turn += 1
                await self._ask(service, f"{service} {number} {turn}", DONOR_TOKENS)

        await asyncio.gather(*(one(number) for number in range(DONOR_REQUESTS)))

    async def _ask(self, service: str, prompt: str, tokens: int) -> None:
        body = {"model": service, "prompt": prompt * 40, "max_tokens": tokens, "ignore_eos": True}
        async with self._http.post(self._addresses.url("gateway") + "/v1/completions", json=body) as reply:
            if reply.status != 200:
                raise CommandError(f"a request was lost: {reply.status} {(await reply.text())[:200]}")
            await reply.read()


def bars(measured: Mapping[str, Measured]) -> list[dict[str, object]]:
    """Each p99 beside its bar."""
    idle_s = SCRAPE_S + FAST_S + ALLOWANCE_S
    asked = {"idle": idle_s, "donor": idle_s + DRAIN_S + packaged_profiles()[PROFILE].lifecycle.sleep_s}
    found: list[dict[str, object]] = []
    for kind, bar_s in asked.items():
        p99_s = measured[kind].p99_s
        value = None if p99_s is None else round(p99_s, 3)
        ok = p99_s is not None and p99_s <= bar_s
        found.append({"name": f"wake_{kind}_p99_s", "value": value, "bar": round(bar_s, 3), "ok": ok})
    return found


async def bench(folder: Path, port_base: int, *, steps: int, cells_each: int, seed: int) -> dict[str, Measured]:
    """Starts the stack, steps, stops it. Raises CommandError when it does not come up."""
    cells = [Cell(kind, number) for kind in ("idle", "donor") for number in range(cells_each)]
    topology = folder / "topology.yaml"
    nodes = [{"node": cell.node, "gpuType": "A100-40GB", "gpus": NODE_GPUS} for cell in cells]
    topology.write_text(yaml.safe_dump(document("Topology", "wake", {"nodes": nodes})))
    stack = LocalStack(
        addresses=LocalAddresses(port_base=port_base),
        state_folder=folder / "state",
        topology=topology,
        bring_up_scale=0.01,
    )
    store = Store(stack.addresses.store_url)
    # Its own limit of connections would hold requests of one burst back until those of another have ended.
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    async with running(stack) as up, http, contextlib.AsyncExitStack() as after:
        after.push_async_callback(store.close)
        run = Bench(up, http, store, seed)
        policies = [policy for cell in cells for policy in cell.resources(armed=False)]
        await apply_when_up(up.services, [*policies, *(cell.pool() for cell in cells)])
        wanted = {cell.service: 1 for cell in cells} | {cell.donor: 2 for cell in cells if cell.donor}
        await wait_until(lambda: run.missing(wanted), timeout_s=BRING_UP_S)
        await run.run(cells, steps)
    return run.measured


def main() -> None:
    """Runs and prints; exit 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object, nothing else")
    parser.add_argument("--verbose", action="store_true", help="what happened in each step, by the services' records")
    parser.add_argument("--steps", type=int, default=30, help="of each kind")
    parser.add_argument("--cells", type=int, default=3, help="pools of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--port-base", type=int, default=13_000)
    parser.add_argument("--keep", type=Path, default=None, help="folder for logs; default: one that is removed")
    given = parser.parse_args()
    before = os.getloadavg()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        shutil.rmtree(folder / "state", ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        measured = asyncio.run(
            bench(folder, given.port_base, steps=given.steps, cells_each=given.cells, seed=given.seed)
        )
    judged = bars(measured)
    document = {
        "machine": {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "load_average_before": [round(one, 2) for one in before],
            "load_average_after": [round(one, 2) for one in os.getloadavg()],
        },
        "inputs": {"steps": given.steps, "cells": given.cells, "seed": given.seed, "scrape_s": SCRAPE_S}
        | {"fast_tick_s": FAST_S, "drain_s": DRAIN_S, "burst_requests": BURST},
        "results": {kind: one.summary() for kind, one in measured.items()},
        "steps": {kind: [step.document() for step in one.steps] for kind, one in measured.items()},
        "bars": judged,
    }
    if given.json:
        print(json.dumps(document, indent=2))
    else:
        for kind, one in measured.items():
            print(f"{kind}: " + json.dumps(one.summary()))
            for step in one.steps if given.verbose else ():
                print("\n".join(step.lines()))
        for bar in judged:
            print(
                f"{bar['name']}: {bar['value']} (asked for: at most {bar['bar']}, {'met' if bar['ok'] else 'NOT met'})"
            )
        print(f"load average {document['machine']}")
    sys.exit(0 if all(bar["ok"] for bar in judged) else 1)


if __name__ == "__main__":
    main()
