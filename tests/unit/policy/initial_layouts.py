"""A pool as it was born, for tests of its ticks."""

from collections.abc import Callable, Collection, Iterable, Mapping

from policy_engine.core.pool.decide import PoolInput, PoolState
from policy_engine.core.pool.gpu_layout import OverlayReplica
from policy_engine.core.pool.initial_layout import LayoutInput, lay_out
from policy_engine.core.pool.pool_candidates import ReplicaFacts
from policy_engine.core.shared.vocabulary import MemberKey
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import LifeCycle


def born(
    pool: Pool,
    policies: tuple[ServicePolicy, ...],
    *,
    now_s: float,
    views: Mapping[MemberKey, RoleSignals] | None = None,
    fronts: Mapping[str, FrontDoor] | None = None,
) -> PoolInput:
    """The first tick after the birth: every replica is where it belongs, nothing has moved yet."""
    birth = lay_out(LayoutInput(pool, policies))
    return PoolInput(
        now_s=now_s,
        pool=pool,
        policies=policies,
        overlay=birth.overlay,
        awake=birth.awake,
        replicas=facts(birth.overlay, birth.awake),
        views=tuple((views or {}).items()),
        fronts=tuple((fronts or {}).items()),
        state=PoolState(),
    )


def facts(
    overlay: Iterable[OverlayReplica],
    up: Collection[str],
    *,
    failed: Collection[str] = (),
    in_flight: Callable[[], int] = lambda: 0,
) -> tuple[ReplicaFacts, ...]:
    """Replicas of which `up` are awake and the rest asleep, but for those that have failed; in the overlay's order."""
    return tuple(
        ReplicaFacts(
            item.replica,
            LifeCycle.FAILED
            if item.replica in failed
            else LifeCycle.ACTIVE
            if item.replica in up
            else LifeCycle.SLEEPING,
            item.replica in up and item.replica not in failed,
            in_flight(),
        )
        for item in overlay
    )
