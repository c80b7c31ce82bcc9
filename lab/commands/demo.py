"""`trimtab demo`: a shifting load on a simulated fleet, with Trimtab and then with a static split of the same GPUs.

Both passes start from the same split, in proportion to the trace's mean demand, on a fresh stack with the same seed. In
the second one the pool is paused and the scaled service is held at its mean.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
import grpc
import typer

from lab.commands.demo_resources import expected_replicas, resources_of_pass
from lab.commands.fresh import fresh_folder
from lab.evaluation import DemoSummary, PassFigures, Slo, summarise, summary_table
from simulator.replay.client import ReplayOptions, replay
from simulator.replay.report import ReplayProgress, ReplayReport
from simulator.scenarios import scenario_folder
from simulator.traces.demo import DemoTrace, demo_from_trace, demo_trace, stream_interval_for
from simulator.traces.model import TraceError
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.cli.addresses import LocalAddresses
from trimtab.cli.connect import PAGE_SIZE, Services, every_item
from trimtab.cli.endpoints import endpoints_of
from trimtab.cli.local import LocalStack, wait_until
from trimtab.cli.output import console
from trimtab.cli.resources import read_resources
from trimtab.cli.signals import stop_on_signals
from trimtab.cli.status import Progress, run_live
from trimtab.cli.up import (
    DEFAULT_STATE_FOLDER,
    PortBaseOption,
    RunningStack,
    Stopped,
    apply_when_up,
    require_stack,
    running,
)
from trimtab.cli_errors import CommandError
from trimtab.config.resources import Resource, ServicePolicy, kind_of
from trimtab.domain.vocabulary import Role
from trimtab.rpc.errors import describe
from trimtab.views.text import message_dict

BRING_UP_SCALE = 0.05
BRING_UP_TIMEOUT_S = 180.0
PLAIN_PROGRESS_S = 10.0
PassName = Literal["policy", "static"]


@dataclass(frozen=True, kw_only=True)
class DemoPlan:
    """Everything that both passes share."""

    trace: DemoTrace
    split: dict[str, int]
    resources: list[Resource]
    port_base: int
    state_folder: Path
    stream_interval: int

    @property
    def folder(self) -> Path:
        """What both passes leave: emptied by the next demo."""
        return self.state_folder / "demo"

    @property
    def addresses(self) -> LocalAddresses:
        """Of both stacks, one after the other."""
        return LocalAddresses(port_base=self.port_base)

    def stack(self, name: PassName) -> LocalStack:
        """A fresh stack of its own for one pass."""
        return LocalStack(
            addresses=self.addresses,
            state_folder=self.folder / name,
            scenario="demo",
            bring_up_scale=BRING_UP_SCALE,
            stream_interval=self.stream_interval,
        )

    def slos(self) -> dict[str, Slo]:
        """Targets by service, as the policies have them."""
        return {
            policy.name: Slo(ttft_s=policy.spec.slo.ttft_s, tpot_s=policy.spec.slo.tpot_s)
            for policy in self.resources
            if isinstance(policy, ServicePolicy)
        }


def demo_command(
    context: typer.Context,
    duration_s: Annotated[float, typer.Option("--duration", min=20, max=3600, help="Seconds of each pass.")] = 120.0,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Azure or Mooncake file instead of the bundled trace.")
    ] = None,
    trace_start_s: Annotated[
        float | None, typer.Option("--trace-start", min=0, help="Where the slice begins; default: the busiest one.")
    ] = None,
    trace_scale: Annotated[
        float | None, typer.Option("--trace-scale", min=0.001, max=10_000, help="Default: what loads the pool fully.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the trace and the prompts.")] = 1,
    port_base: PortBaseOption = None,
    state_folder: Annotated[Path, typer.Option("--state-dir", help="Logs and summary.json.")] = DEFAULT_STATE_FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="The summary as one JSON document, nothing else.")] = False,
) -> None:
    """Run the demo and compare Trimtab with a static split."""
    require_stack("demo")
    try:
        made = (
            demo_trace(duration_s=duration_s, seed=seed)
            if trace is None
            else demo_from_trace(trace, duration_s=duration_s, seed=seed, start_s=trace_start_s, scale=trace_scale)
        )
    except (TraceError, OSError) as error:
        raise CommandError(str(error)) from None
    plan = DemoPlan(
        trace=made,
        split=made.static_replicas(),
        resources=read_resources([scenario_folder("demo") / "resources"]),
        port_base=endpoints_of(context).port_base if port_base is None else port_base,
        state_folder=state_folder,
        stream_interval=stream_interval_for(made.peak_output_tps),
    )
    console.quiet = as_json
    try:
        with fresh_folder(plan.folder, plan.addresses, command="demo"):
            summary = asyncio.run(_demo(plan, trace_name="bundled" if trace is None else trace.name))
    except Stopped:
        console.print("stopped", highlight=False)
        raise typer.Exit(130) from None
    if as_json:
        console.quiet = False
        print(json.dumps(summary.to_json(), indent=2))


async def _demo(plan: DemoPlan, *, trace_name: str) -> DemoSummary:
    stop = stop_on_signals()
    _introduce(plan, trace_name)
    policy = await _pass(plan, "policy", stop)
    static = await _pass(plan, "static", stop)
    summary = DemoSummary(
        policy=policy,
        static=static,
        inputs={
            "trace": trace_name,
            "notes": list(plan.trace.notes),
            "duration_s": plan.trace.duration_s,
            "seed": plan.trace.seed,
            "requests": len(plan.trace.requests),
            "static_split": plan.split,
            "tokens_per_chunk": plan.stream_interval,
            "bring_up_scale": BRING_UP_SCALE,
        },
        machine={"cpus": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
    )
    path = plan.state_folder / "summary.json"
    path.write_text(json.dumps(summary.to_json(), indent=2) + "\n")
    console.print(summary_table(summary))
    for bar in summary.bars:
        mark = "met" if bar.ok else "NOT met"
        console.print(f"  {bar.name}: {bar.value:g} (asked for: {bar.bar:g}, {mark})", highlight=False)
    console.print(f"summary: {path}; decisions: {plan.state_folder / 'decisions.json'}", highlight=False)
    return summary


def _introduce(plan: DemoPlan, trace_name: str) -> None:
    split = ", ".join(f"{count} {service}" for service, count in sorted(plan.split.items()))
    console.print(
        f"trace {trace_name}: {len(plan.trace.requests)} requests in {plan.trace.duration_s:.0f} s, "
        f"seed {plan.trace.seed}; both passes start from the split {split}",
        highlight=False,
        soft_wrap=True,
    )
    for note in plan.trace.notes:
        console.print(f"  {note}", highlight=False, soft_wrap=True)
    console.print(
        f"simulated servers stream {plan.stream_interval} tokens a chunk (vLLM's --stream-interval) and take "
        f"{BRING_UP_SCALE:.0%} of the measured start-up and first-sleep time; sleeps and wakes take what was measured",
        highlight=False,
        soft_wrap=True,
    )


async def _pass(plan: DemoPlan, name: PassName, stop: asyncio.Event) -> PassFigures:
    stack = plan.stack(name)
    resources = resources_of_pass(plan.resources, plan.split, plan.trace.mean_demand, static=name == "static")
    console.rule(f"{name} pass: bringing the fleet up")
    async with running(stack, stop=stop) as up:
        await apply_when_up(up.services, resources)
        await _bring_up(up.services, resources, stop)
        if name == "static":
            await _pause_all(up.services, resources)
        before = await _fleet_stats(stack)
        console.rule(
            f"{name} pass: {plan.trace.duration_s:.0f} s of load; more: trimtab status --watch, trimtab decisions"
        )
        report = await _load(plan, up, name, stop)
        if report.stopped:
            raise Stopped
        figures = await _figures(plan, up, name, report, before)
        if name == "policy":
            await _show_and_keep_decisions(plan, up.services)
        restarts = {child: count for child, count in up.supervisor.restarts.items() if count}
        if restarts:
            console.print(f"restarted: {restarts}", highlight=False)
    return figures


async def _bring_up(services: Services, resources: list[Resource], stop: asyncio.Event) -> None:
    expected = expected_replicas(resources)

    async def missing() -> str:
        if stop.is_set():
            raise Stopped
        try:
            status = await services.policy.GetStatus(policy_pb2.GetStatusRequest(), timeout=2.0)
        except grpc.aio.AioRpcError as error:
            return describe(error)
        routable = {
            (service.service, Role.from_number(role.role)): role.routable
            for service in status.services
            for role in service.roles
        }
        waiting = [
            f"{service} {routable.get((service, role), 0)} of {count} {role}"
            for (service, role), count in sorted(expected.items())
            if routable.get((service, role), 0) < count
        ]
        return ", ".join(waiting)

    await wait_until(missing, timeout_s=BRING_UP_TIMEOUT_S)


async def _pause_all(services: Services, resources: list[Resource]) -> None:
    for resource in resources:
        number, reason = kind_of(resource).number, "static pass of the demo"
        await services.policy.Pause(policy_pb2.PauseRequest(kind=number, name=resource.name, reason=reason))


async def _load(plan: DemoPlan, up: RunningStack, name: PassName, stop: asyncio.Event) -> ReplayReport:
    """Replays the trace while the live view shows what happens."""
    shown: Progress | None = None
    said_s = 0.0

    def note(progress: ReplayProgress) -> None:
        nonlocal shown, said_s
        shown = Progress(
            label=f"{name} pass",
            elapsed_s=progress.elapsed_s,
            total_s=progress.duration_s,
            sent=progress.sent,
            finished=progress.finished,
            lost=progress.lost,
        )
        if not console.is_terminal and progress.elapsed_s - said_s >= PLAIN_PROGRESS_S:
            said_s = progress.elapsed_s
            console.print(
                f"{progress.elapsed_s:.0f} s: sent {progress.sent}, finished {progress.finished}, lost {progress.lost}",
                highlight=False,
            )

    options = ReplayOptions(url=up.stack.addresses.url("gateway"), seed=plan.trace.seed)
    done = asyncio.Event()
    view = (
        asyncio.create_task(run_live(up.services, until=done, progress=lambda: shown, events=lambda: list(up.events)))
        if console.is_terminal and not console.quiet
        else None
    )
    try:
        return await replay(
            plan.trace.requests, options, duration_s=plan.trace.duration_s, on_progress=note, stopping=stop
        )
    finally:
        done.set()
        if view is not None:
            await view


async def _figures(
    plan: DemoPlan, up: RunningStack, name: PassName, report: ReplayReport, before: FleetStats
) -> PassFigures:
    after = await _fleet_stats(up.stack)
    steps = [
        step
        for operation in await _operations(up.services)
        if operation.kind == actuator_pb2.OPERATION_KIND_TRANSITION
        for step in operation.steps
        if step.state == actuator_pb2.OPERATION_STATE_SUCCEEDED
    ]
    decisions = await all_decisions(up.services)
    return PassFigures(
        name=name,
        summary=summarise(report, plan.slos()),
        gpu_hours=(after.gpu_seconds_awake - before.gpu_seconds_awake) / 3600,
        misrouted_requests=after.misrouted - before.misrouted,
        wakes=sum(step.kind == actuator_pb2.STEP_KIND_WAKE for step in steps),
        releases=sum(step.kind == actuator_pb2.STEP_KIND_RELEASE for step in steps),
        transitions=sum(decision.kind == decision_pb2.DECISION_KIND_TRANSITION for decision in decisions),
        decisions=len(decisions),
    )


@dataclass(frozen=True, kw_only=True)
class FleetStats:
    """What the simulated servers counted, over all of them."""

    misrouted: int
    gpu_seconds_awake: float


async def _fleet_stats(stack: LocalStack) -> FleetStats:
    url = stack.addresses.url("fleet") + "/stats"
    async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(url) as reply:
        stats: dict[str, Any] = await reply.json()
    return FleetStats(
        misrouted=sum(int(service["requests_received_while_asleep"]) for service in stats["services"].values()),
        gpu_seconds_awake=sum(float(seconds) for seconds in stats["gpu_seconds_awake"].values()),
    )


async def _operations(services: Services) -> list[actuator_pb2.Operation]:
    return await every_item(
        lambda token: services.actuator.ListOperations(
            actuator_pb2.ListOperationsRequest(page_size=PAGE_SIZE, page_token=token)
        ),
        lambda page: page.operations,
    )


async def all_decisions(services: Services) -> list[decision_pb2.Decision]:
    """Every decision that the engine still has, newest first."""
    return await every_item(
        lambda token: services.policy.ListDecisions(
            policy_pb2.ListDecisionsRequest(page_size=PAGE_SIZE, page_token=token)
        ),
        lambda page: page.decisions,
    )


async def _show_and_keep_decisions(plan: DemoPlan, services: Services) -> None:
    """Write all decisions beside the summary and show the output of `trimtab explain` for one transition."""
    decisions = await all_decisions(services)
    path = plan.state_folder / "decisions.json"
    path.write_text(json.dumps([message_dict(decision) for decision in decisions], indent=2) + "\n")
    example = next(
        (
            decision
            for decision in decisions
            if decision.transition.releases
            and decision.transition.wakes
            and decision.outcome.state == decision_pb2.OUTCOME_STATE_SUCCEEDED
        ),
        None,
    )
    if example is None:
        return
    console.rule(f"trimtab explain {example.decision_id}")
    reply = await services.policy.ExplainDecision(policy_pb2.ExplainDecisionRequest(decision_id=example.decision_id))
    for line in reply.lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
