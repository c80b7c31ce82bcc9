"""`trimtab decisions` and `trimtab explain`: what the engine decided, why, and what came of it.

Pre-warmings, which the actuator begins by itself, are shown among the decisions, and explained as every operation is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.message import DecodeError

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.api.store.v1 import engine_pb2
from trimtab.cli.connect import Services, call
from trimtab.cli.endpoints import Endpoints, endpoints_of
from trimtab.cli.output import console, print_json
from trimtab.cli.records import table_of
from trimtab.cli.status import fetch_pre_warmings
from trimtab.views.decisions import (
    OPERATION_PREFIX,
    DecisionRow,
    decision_row,
    is_finished,
    newest_rows,
    operation_lines,
    pre_warming_row,
    pre_warmings,
)
from trimtab.views.text import message_dict, message_dicts

AGAIN_S = 2.0
"""Until an actuator that does not answer is asked again."""


def decisions_command(
    context: typer.Context,
    subject: Annotated[str, typer.Argument(metavar="[SERVICE or POOL]")] = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on with new ones until Ctrl-C.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=500, help="How many past ones.")] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON, decisions alone; with --watch one document a line.")
    ] = False,
) -> None:
    """The newest decisions and pre-warmings, newest first; with --watch as they come."""
    endpoints = endpoints_of(context)
    if watch:
        call(endpoints, lambda services: _watch(services, subject=subject, limit=limit, as_json=as_json))
        return
    decisions, warmed = call(endpoints, lambda services: _fetch(services, subject, limit, as_json=as_json))
    if as_json:
        print_json(message_dicts(decisions))
    else:
        console.print(table_of(newest_rows(decisions, warmed, limit=limit), width=console.width))


async def _fetch(
    services: Services, subject: str, limit: int, *, as_json: bool
) -> tuple[Sequence[decision_pb2.Decision], Sequence[actuator_pb2.Operation]]:
    request = policy_pb2.ListDecisionsRequest(subject=subject, page_size=limit)
    reply = await services.policy.ListDecisions(request)
    return reply.decisions, [] if as_json else await fetch_pre_warmings(services, subject)


async def _watch(services: Services, *, subject: str, limit: int, as_json: bool) -> None:
    beside = None if as_json else asyncio.create_task(_watch_pre_warmings(services, subject))
    try:
        async for event in services.policy.WatchDecisions(policy_pb2.WatchDecisionsRequest(replay_last=limit)):
            if event.WhichOneof("event") != "decision" or subject not in ("", event.decision.subject):
                continue
            if as_json:
                print(json.dumps(message_dict(event.decision), ensure_ascii=False), flush=True)
            else:
                _print_line(decision_row(event.decision))
    finally:
        if beside is not None:
            beside.cancel()


async def _watch_pre_warmings(services: Services, subject: str) -> None:
    """A line when one begins, and when it ends; those that had ended before are left to the table."""
    shown: set[tuple[str, bool]] = set()
    begun = False
    while True:
        try:
            async for event in services.actuator.WatchOperations(actuator_pb2.WatchOperationsRequest()):
                operations = [*event.snapshot.operations, *([event.operation] if event.HasField("operation") else [])]
                for operation in pre_warmings(operations, subject):
                    key = (operation.operation_id, is_finished(operation))
                    if key not in shown and (begun or not is_finished(operation)):
                        _print_line(pre_warming_row(operation))
                    shown.add(key)
                begun = True
        except grpc.aio.AioRpcError:
            pass
        await asyncio.sleep(AGAIN_S)


def _print_line(row: DecisionRow) -> None:
    console.print(row.line(), markup=False, highlight=False, soft_wrap=True)


def explain_command(
    context: typer.Context,
    identity: Annotated[str, typer.Argument(metavar="DECISION or OPERATION")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """One decision: its inputs, the rule that fired, every clamp, the pairs looked at, and the outcome.

    Of an operation, such as a pre-warming: why, each step, since when, and how it ended.
    """
    endpoints = endpoints_of(context)
    if identity.startswith(OPERATION_PREFIX):
        _explain_operation(endpoints, identity, as_json=as_json)
        return
    request = policy_pb2.ExplainDecisionRequest(decision_id=identity)
    reply = call(endpoints, lambda services: services.policy.ExplainDecision(request))
    if as_json:
        print_json(_explained(reply))
        return
    _print_lines(reply.lines)
    if not reply.replay_matches and not reply.not_replayed:
        console.print("Computing it again from its inputs did not give the same: report this.", highlight=False)


def _explained(reply: policy_pb2.ExplainDecisionResponse) -> dict[str, Any]:
    """The reply with the decision's input spelt out, where this release can read it."""
    document = message_dict(reply)
    with contextlib.suppress(DecodeError):
        if reply.decision.replay:
            document["decision"]["replay"] = message_dict(engine_pb2.ReplayRecord.FromString(reply.decision.replay))
    return document


def _explain_operation(endpoints: Endpoints, identity: str, *, as_json: bool) -> None:
    request = actuator_pb2.GetOperationRequest(operation_id=identity)
    operation = call(endpoints, lambda services: services.actuator.GetOperation(request)).operation
    if as_json:
        print_json(message_dict(operation))
    else:
        _print_lines(operation_lines(operation))


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
