"""`trimtab decisions` and `trimtab explain`: what the engine decided, why, and what came of it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.cli.connect import Services, call, endpoints_of
from trimtab.cli.output import console, message_dict, message_dicts, print_json, short_name, time_text
from trimtab.cli.status import decision_table


def decisions_command(
    context: typer.Context,
    subject: Annotated[str, typer.Argument(metavar="[SERVICE or POOL]")] = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on with new ones until Ctrl-C.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=500, help="How many past ones.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="JSON; with --watch one document a line.")] = False,
) -> None:
    """The newest decisions, newest first; with --watch as they come."""
    endpoints = endpoints_of(context)
    if watch:
        call(endpoints, lambda services: _watch(services, subject=subject, limit=limit, as_json=as_json))
        return
    request = policy_pb2.ListDecisionsRequest(subject=subject, page_size=limit)
    reply = call(endpoints, lambda services: services.policy.ListDecisions(request))
    if as_json:
        print_json(message_dicts(reply.decisions))
    else:
        console.print(decision_table(reply.decisions))


async def _watch(services: Services, *, subject: str, limit: int, as_json: bool) -> None:
    async for event in services.policy.WatchDecisions(policy_pb2.WatchDecisionsRequest(replay_last=limit)):
        if event.WhichOneof("event") != "decision" or subject not in ("", event.decision.subject):
            continue
        if as_json:
            print(json.dumps(message_dict(event.decision), ensure_ascii=False), flush=True)
        else:
            console.print(_line(event.decision), highlight=False, soft_wrap=True)


def _line(decision: decision_pb2.Decision) -> str:
    rule = short_name(decision_pb2.Rule.Name(decision.rule), "RULE_")
    outcome = short_name(decision_pb2.OutcomeState.Name(decision.outcome.state), "OUTCOME_STATE_")
    return (
        f"{time_text(decision.decide_time)} {decision.decision_id} {decision.subject} {rule}: {decision.reason} "
        f"[{outcome}]".replace("[", "\\[")
    )


def explain_command(
    context: typer.Context,
    decision_id: Annotated[str, typer.Argument(metavar="DECISION")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """One decision: its inputs, the rule that fired, every clamp, the pairs looked at, and the outcome."""
    endpoints = endpoints_of(context)
    request = policy_pb2.ExplainDecisionRequest(decision_id=decision_id)
    reply = call(endpoints, lambda services: services.policy.ExplainDecision(request))
    if as_json:
        print_json(message_dict(reply))
        return
    for line in reply.lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    verdict = "gives the same decision" if reply.replay_matches else "gives ANOTHER decision: report this"
    console.print(f"Computing it again from its inputs {verdict}.", highlight=False)
