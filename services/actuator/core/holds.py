"""Holds: why a replica is not visible. Each owner has at most one, and lifts only its own."""

from dataclasses import replace

from actuator.core.model import Hold, Replica
from trimtab.domain.vocabulary import HoldOwner


def put(replica: Replica, owner: HoldOwner, *, reason: str, now_s: float) -> Replica:
    """With the owner's hold; an existing one keeps its time and takes the new reason."""
    others = tuple(hold for hold in replica.holds if hold.owner is not owner)
    since_s = next((hold.since_s for hold in replica.holds if hold.owner is owner), now_s)
    holds = sorted((*others, Hold(owner=owner, reason=reason, since_s=since_s)), key=lambda hold: hold.owner)
    return replace(replica, holds=tuple(holds))


def lift(replica: Replica, owner: HoldOwner) -> Replica:
    """Without the owner's hold; those of other owners stay."""
    return replace(replica, holds=tuple(hold for hold in replica.holds if hold.owner is not owner))


def has(replica: Replica, owner: HoldOwner) -> bool:
    """Whether the owner holds it."""
    return any(hold.owner is owner for hold in replica.holds)
