"""Places of replicas in the network, and their effect on the link that carries KV between them.

HeteroScale (challenge 2) measured that prefill and decode replicas under different switches have about 20 % less
bandwidth for KV than under one; that is the default here.
"""

from __future__ import annotations

import dataclasses

from simulator.core.timing import KvLink

CROSS_SWITCH_SHARE = 0.8
"""Bandwidth across switches over that under one switch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The switches over a replica, from the rack's upwards."""

    s1: str = "s1-0"
    s2: str = "s2-0"
    cluster: str = "local"

    def shares_s1_with(self, other: Place) -> bool:
        """Whether both are under one S1 switch."""
        return (self.cluster, self.s2, self.s1) == (other.cluster, other.s2, other.s1)


def link_between(base: KvLink, source: Place, target: Place, *, cross_share: float = CROSS_SWITCH_SHARE) -> KvLink:
    """The link between two places; `base` is that under a common S1. Raises ValueError for a share beyond (0, 1]."""
    if not 0 < cross_share <= 1:
        raise ValueError(f"cross_share must be above 0 and at most 1, not {cross_share!r}")
    if source.shares_s1_with(target):
        return base
    return dataclasses.replace(base, bytes_per_s=base.bytes_per_s * cross_share)
