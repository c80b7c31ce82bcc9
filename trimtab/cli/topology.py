"""`trimtab topology`: the pre-scheduler's tree with free GPUs and subgroup classes, and the Deployment Groups in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.tree import Tree

from trimtab.api.common.v1 import types_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.cli.connect import PAGE_SIZE, Services, call, every_item
from trimtab.cli.endpoints import endpoints_of
from trimtab.cli.output import console, message_dict, message_dicts, print_json, short_name


def topology_command(
    context: typer.Context,
    cluster: Annotated[str, typer.Option("--cluster", help="Only this cluster.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Clusters, S2 and S1 switches with free GPUs by type and subgroup class; Deployment Groups by domain."""
    endpoints = endpoints_of(context)
    topology, groups = call(endpoints, lambda services: _fetch(services, cluster))
    if as_json:
        print_json(message_dict(topology) | {"deployment_groups": message_dicts(groups)})
        return
    console.print(_tree(topology, groups))
    for unreachable in topology.unreachable_clusters:
        console.print(f"{unreachable.cluster} did not answer: {unreachable.error}", style="red")


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


def _tree(topology: scheduler_pb2.GetTopologyResponse, groups: Sequence[scheduler_pb2.DeploymentGroup]) -> Tree:
    """Domains come in any order; parents are named."""
    root = Tree("topology")
    branches: dict[tuple[str, str], Tree] = {}
    waiting = sorted(topology.domains, key=lambda domain: (-domain.level, domain.cluster, domain.name))
    for domain in waiting:
        parent = branches.get((domain.cluster, domain.parent), root)
        branches[domain.cluster, domain.name] = parent.add(_domain_text(domain))
    for group in groups:
        branch = branches.get((group.cluster, group.domain), root)
        roles = ", ".join(
            f"{len(role.replicas)} {short_name(types_pb2.Role.Name(role.role), 'ROLE_')}" for role in group.roles
        )
        branch.add(f"[bold]{group.group}[/bold] {group.service}: {roles}")
    return root


def _domain_text(domain: scheduler_pb2.Domain) -> str:
    level = short_name(types_pb2.TopologyLevel.Name(domain.level), "TOPOLOGY_LEVEL_")
    gpus = ", ".join(f"{count.free} of {count.total} {count.gpu_type} free" for count in domain.gpus)
    text = f"{level} {domain.name}: {gpus or 'no GPUs'}"
    if domain.subgroup_class:
        text += f" ({short_name(scheduler_pb2.SubgroupClass.Name(domain.subgroup_class), 'SUBGROUP_CLASS_')} subgroup)"
    return text
