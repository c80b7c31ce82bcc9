"""Carries a plan out: one write to each cluster's actuator, and the writes that got no answer."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from prescheduler.core.admission import clock_text
from prescheduler.core.model import MissingCluster, Plan
from prescheduler.core.writes import ClusterWrite, fold_writes
from prescheduler.shell.clusters import Clusters, View
from prescheduler.shell.records import Records
from trimtab.api.common.v1 import types_pb2
from trimtab.domain.placement import GroupPlacement
from trimtab.store import keys
from trimtab.store.clock import StoreClock
from trimtab.store.lease import Lease

log = structlog.get_logger(__name__)


class NotLeading(Exception):
    """The lease was lost, or never held: nothing may be written."""


@dataclass(frozen=True)
class _Unsettled:
    """A write without a reply: until it expires, the cluster may still carry it out."""

    cluster: str
    groups: tuple[GroupPlacement, ...]
    until_s: float


class Writer:
    """Writes plans under the leader's token. ``outdated`` after a write: a cluster had changed since it was asked."""

    def __init__(
        self, clusters: Clusters, records: Records, lease: Lease, clock: StoreClock, *, placement_ttl_s: float
    ) -> None:
        self._clusters = clusters
        self._records = records
        self._lease = lease
        self._clock = clock
        self._placement_ttl_s = placement_ttl_s
        self._unsettled: list[_Unsettled] = []
        self._writes = 0
        self.outdated = False

    def token(self) -> int:
        """The fencing token. Raises ``NotLeading`` when the lease is not held."""
        token = self._lease.token
        if token is None:
            raise NotLeading("the lease is not held any more")
        return token

    def unsettled(self) -> list[MissingCluster]:
        """Clusters with a write that may still take effect, as silent ones: its services wait until it expires."""
        now_s = self._clock.now_s()
        self._unsettled = [item for item in self._unsettled if now_s < item.until_s]
        return [
            MissingCluster(
                cluster=item.cluster,
                error=f"a write may still take effect until {clock_text(item.until_s)}",
                services=frozenset(group.service for group in item.groups),
                known=True,
            )
            for item in self._unsettled
        ]

    def unsettled_groups(self) -> list[GroupPlacement]:
        """The groups of those writes."""
        return [group for item in self._unsettled for group in item.groups]

    async def apply(self, plan: Plan, view: View) -> tuple[Plan, list[GroupPlacement]]:
        """The results as they came out, and the groups that were accepted.

        Raises ``NotLeading``, ``FencedOff``, ``StoreUnavailable``.
        """
        self.outdated = False
        by_cluster = plan.by_cluster()
        if not by_cluster:
            return plan, []
        await self._records.announce(self.token(), [group for groups in by_cluster.values() for group in groups])
        token = self.token()
        revisions = {item.cluster: item.inventory_revision for item in view.inventories}
        expire_s = self._clock.now_s() + self._placement_ttl_s
        self._writes += 1
        outcomes = await asyncio.gather(
            *(
                self._clusters.apply(
                    cluster,
                    groups,
                    inventory_revision=revisions[cluster],
                    fencing=types_pb2.Fencing(writer=keys.PRESCHEDULER, token=token),
                    expire_s=expire_s,
                    request_id=f"prescheduler-{token}-{self._writes}-{cluster}",
                )
                for cluster, groups in by_cluster.items()
            )
        )
        accepted: list[GroupPlacement] = []
        writes: dict[str, ClusterWrite] = {}
        for (cluster, groups), outcome in zip(by_cluster.items(), outcomes, strict=True):
            writes[cluster] = outcome.write
            self._note(cluster, groups, outcome.write, expire_s)
            if not outcome.write.error:
                accepted += [group for group in groups if group.group not in outcome.write.refused]
        self.outdated = any(write.outdated for write in writes.values())
        if any(outcome.fenced_off for outcome in outcomes):
            await self._step_down(max(outcome.highest_token for outcome in outcomes))
            raise NotLeading("an actuator has seen a newer leader")
        return fold_writes(plan, writes), accepted

    def _note(self, cluster: str, groups: Sequence[GroupPlacement], write: ClusterWrite, expire_s: float) -> None:
        if write.unanswered:
            self._unsettled.append(_Unsettled(cluster, tuple(groups), expire_s))
        if write.error or write.refused:
            log.warning(
                "write refused", cluster=cluster, error=write.error, refused=dict(sorted(write.refused.items()))
            )

    async def _step_down(self, highest_token: int) -> None:
        """Give the lease up, and lift the store's counter of tokens if it is behind: it was lost or restored."""
        log.warning("fenced off by an actuator", token=self._lease.token, highest_token=highest_token)
        await self._records.raise_token(highest_token)
        await self._lease.release()
