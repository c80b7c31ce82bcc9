"""The pre-scheduler's tree: switches with their free GPUs, and the Deployment Groups in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.api.common.v1 import types_pb2
from trimtab.api.scheduler.v1 import scheduler_pb2
from trimtab.views.text import message_dict, message_dicts, short_name


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLine:
    """One Deployment Group and its replicas by role."""

    group: str
    service: str
    roles: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One domain, the domains under it and the groups bound to it."""

    text: str
    branches: list[Branch] = field(default_factory=list)
    groups: list[GroupLine] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyView:
    """The tree from its root, and a line for each cluster that did not answer."""

    root: Branch
    unreachable: tuple[str, ...]


def topology_view(
    topology: scheduler_pb2.GetTopologyResponse, groups: Sequence[scheduler_pb2.DeploymentGroup]
) -> TopologyView:
    """The tree of what was answered. Domains come in any order; each names its parent."""
    root = Branch(text="topology")
    branches: dict[tuple[str, str], Branch] = {}
    for domain in sorted(topology.domains, key=lambda item: (-item.level, item.cluster, item.name)):
        branch = branches[domain.cluster, domain.name] = Branch(text=_domain_text(domain))
        branches.get((domain.cluster, domain.parent), root).branches.append(branch)
    for group in groups:
        roles = ", ".join(
            f"{len(role.replicas)} {short_name(types_pb2.Role.Name(role.role), 'ROLE_')}" for role in group.roles
        )
        line = GroupLine(group=group.group, service=group.service, roles=roles)
        branches.get((group.cluster, group.domain), root).groups.append(line)
    lost = tuple(f"{item.cluster} did not answer: {item.error}" for item in topology.unreachable_clusters)
    return TopologyView(root=root, unreachable=lost)


def topology_document(
    topology: scheduler_pb2.GetTopologyResponse, groups: Sequence[scheduler_pb2.DeploymentGroup]
) -> dict[str, Any]:
    """What was answered, as one JSON document."""
    return message_dict(topology) | {"deployment_groups": message_dicts(groups)}


def _domain_text(domain: scheduler_pb2.Domain) -> str:
    level = short_name(types_pb2.TopologyLevel.Name(domain.level), "TOPOLOGY_LEVEL_")
    gpus = ", ".join(f"{count.free} of {count.total} {count.gpu_type} free" for count in domain.gpus)
    text = f"{level} {domain.name}: {gpus or 'no GPUs'}"
    if domain.subgroup_class:
        text += f" ({short_name(scheduler_pb2.SubgroupClass.Name(domain.subgroup_class), 'SUBGROUP_CLASS_')} subgroup)"
    return text
