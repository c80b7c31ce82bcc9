"""Folds what the actuators did with a plan back into its results."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from prescheduler.core.model import Constraint, Outcome, Plan, ServiceResult
from trimtab.domain.placement import GroupPlacement


@dataclass(frozen=True, kw_only=True)
class ClusterWrite:
    """The result of one cluster's write. ``refused``: group → why; ``error`` concerns all of its groups."""

    refused: Mapping[str, str]
    error: str = ""
    unanswered: bool = False
    """No reply came: it may have been carried out, and the next cycle sees what is."""
    outdated: bool = False
    """The cluster had changed since it was asked: no group was judged, and nothing done."""


def fold_writes(plan: Plan, writes: Mapping[str, ClusterWrite]) -> Plan:
    """The plan's results as they came out: refused groups are taken out, with the actuator's reason."""
    return Plan(results=tuple(_fold(result, writes) for result in plan.results))


def _fold(result: ServiceResult, writes: Mapping[str, ClusterWrite]) -> ServiceResult:
    kept: list[GroupPlacement] = []
    reasons: list[str] = []
    unanswered = outdated = False
    for group in result.groups:
        write = writes[group.cluster]
        reason = write.error or write.refused.get(group.group, "")
        if not reason:
            kept.append(group)
            continue
        unanswered = unanswered or write.unanswered
        outdated = outdated or write.outdated
        if write.unanswered:
            text = f"cluster {group.cluster} did not answer the write: {reason}"
        elif write.error:
            text = f"cluster {group.cluster} refused the write: {reason}"
        else:
            text = f"cluster {group.cluster} refused group {group.group}: {reason}"
        if text not in reasons:
            reasons.append(text)
    if not reasons:
        return result
    nothing = Outcome.HELD if unanswered or outdated else Outcome.DENIED
    return replace(
        result,
        outcome=Outcome.PARTIAL if kept else nothing,
        constraint=Constraint.CLUSTER_UNREACHABLE if unanswered else Constraint.ACTUATOR_REFUSED,
        detail="; ".join(reasons) + "; the next cycle tries again",
        groups=tuple(kept),
    )
