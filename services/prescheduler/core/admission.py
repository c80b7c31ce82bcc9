"""Which requests a cycle serves: not what is expired, fenced off, or held in part by a cluster that does not answer."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from prescheduler.core.model import Constraint, MissingCluster, Outcome, ServiceResult
from trimtab.domain.scaling import ScalingRequest


def admission(
    request: ScalingRequest,
    now_s: float,
    highest_tokens: Mapping[str, int],
    missing: Sequence[MissingCluster],
    *,
    reachable: bool,
) -> ServiceResult | None:
    """Why a request is not served at all; None when it is. ``reachable``: at least one cluster answered."""
    highest = highest_tokens.get(request.writer, 0)
    if request.token < highest:
        return held(
            request,
            Constraint.FENCED_OFF,
            f"token {request.token} of {request.writer} is fenced off: {highest} is newer",
        )
    if request.expires_s is not None and request.expires_s <= now_s:
        return held(
            request, Constraint.EXPIRED, f"expired at {clock_text(request.expires_s)}; nothing is placed or removed"
        )
    for lost in missing:
        holds = request.service in lost.services if lost.known else lost.cluster in request.clusters
        if holds or not reachable:
            what = f"holds replicas of {request.service}" if lost.known and holds else "may hold some of it"
            return held(
                request,
                Constraint.CLUSTER_UNREACHABLE,
                f"cluster {lost.cluster} did not answer ({lost.error}) and {what}; nothing is placed or removed",
            )
    return None


def clock_text(unix_s: float) -> str:
    """A time in sentences, in UTC. Absolute, so that a sentence stays the same from cycle to cycle."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")


def held(request: ScalingRequest, constraint: Constraint, detail: str) -> ServiceResult:
    """A request that is not judged in this cycle."""
    return ServiceResult(
        service=request.service,
        decision_id=request.decision_id,
        outcome=Outcome.HELD,
        constraint=constraint,
        detail=detail,
    )
