"""`trimtab topology`: the pre-scheduler's tree with free GPUs and subgroup classes, and the Deployment Groups in it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.tree import Tree

from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.cli.connect import PAGE_SIZE, Services, call, every_item
from trimtab.cli.endpoints import endpoints_of
from trimtab.cli.output import console, print_json
from trimtab.views.topology import Branch, topology_document, topology_view


def topology_command(
    context: typer.Context,
    cluster: Annotated[str, typer.Option("--cluster", help="Only this cluster.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Clusters, S2 and S1 switches with free GPUs by type and subgroup class; Deployment Groups by domain."""
    endpoints = endpoints_of(context)
    topology, groups = call(endpoints, lambda services: _fetch(services, cluster))
    if as_json:
        print_json(topology_document(topology, groups))
        return
    view = topology_view(topology, groups)
    console.print(_tree(view.root))
    for line in view.unreachable:
        console.print(line, style="red")


async def _fetch(
    services: Services, cluster: str
) -> tuple[scheduler_pb2.GetTopologyResponse, list[scheduler_pb2.DeploymentGroup]]:
    topology = await services.prescheduler.GetTopology(scheduler_pb2.GetTopologyRequest(cluster=cluster))
    groups = await every_item(
        lambda token: services.prescheduler.ListDeploymentGroups(
            scheduler_pb2.ListDeploymentGroupsRequest(page_size=PAGE_SIZE, page_token=token)
        ),
        lambda page: page.groups,
    )
    return topology, [group for group in groups if cluster in ("", group.cluster)]


def _tree(branch: Branch) -> Tree:
    tree = Tree(branch.text)
    for child in branch.branches:
        tree.add(_tree(child))
    for group in branch.groups:
        tree.add(f"[bold]{group.group}[/bold] {group.service}: {group.roles}")
    return tree
