"""Whether a gateway can take requests: whether it has an endpoint set that it may route by, and else why not. Pure.

A set is one that names a service, also one without a routable replica: requests for that are held, and it is their
arrival that wakes it. One cluster's set is enough; a stale one is routed by, and is enough too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a gateway has of one cluster."""

    cluster: str
    revision: int | None
    """Of the set that is routed by; None before the first."""
    services: frozenset[str] | None
    """That the set names; None while it is not trusted."""
    quiet: Mapping[str, str]
    """Ways to the cluster that do not confirm the set, with the reason."""
    stale: bool
    """Whether no way has one."""


def readiness(standings: Sequence[Standing], *, stopping: bool) -> tuple[bool, str]:
    """Whether the gateway is ready, and a line a cluster: by which set, or what is missing."""
    if stopping:
        return False, "stopping\n"
    ready = any(standing.services for standing in standings)
    return ready, "".join(f"{standing.cluster}: {_said(standing)}\n" for standing in standings)


def _said(standing: Standing) -> str:
    silence = "; ".join(f"{way}: {why}" for way, why in sorted(standing.quiet.items()))
    if standing.revision is None:
        return f"no endpoint set yet ({silence})" if silence else "no endpoint set yet"
    of = f"the endpoint set of revision {standing.revision}"
    if standing.services is None:
        return f"{of} is not trusted: the process stood still, and asks for a newer one"
    if not standing.services:
        return f"{of} names no service: apply a ServicePolicy"
    return f"{of}, which is stale ({silence})" if standing.stale else of
