"""How long a member's needs last, learnt from its own past.

A rescue takes seconds and costs its donor a replica. A burst of on-off traffic is over by then: the receiver has more
than it needs when the next member bursts. So each need, a time in which a member has more work than it can do, is
judged again after a while: when little arrives by then for the replicas that it had, the need was brief. A member
whose needs are brief is rescued only once a need has lasted. A need that lasts is served seconds later, and shortens
the wait of the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policy_engine.core.pool.load import Load
from trimtab.config.poolrules import LoadRule

# About when a rescue would have had its effect.
LOOK_AGAIN_S = 8.0
# Arriving work per replica below which nothing is left of a spell.
OVER_BELOW = 0.6
LEARNING_RATE = 0.3


@dataclass(frozen=True, slots=True)
class NeedMemory:
    """`brief` is the smoothed share of spells that were. `pressed_since_s`: since when the member is in need without a
    break. `watched_since_s` and `watched_replicas`: the spell that will be looked at again, and what it began with.
    """

    brief: float = 0.0
    pressed_since_s: float | None = None
    watched_since_s: float | None = None
    watched_replicas: int = 0
    window_end_s: float | None = None

    def waits_s(self, rule: LoadRule) -> float:
        """How much longer the need has to last before it is served."""
        if self.pressed_since_s is None or self.window_end_s is None:
            return rule.patience_s * self.brief
        return max(0.0, rule.patience_s * self.brief - (self.window_end_s - self.pressed_since_s))


def remember_need(
    memory: NeedMemory, load: Load | None, end_s: float | None, rule: LoadRule, *, starved: bool
) -> NeedMemory:
    """The memory after this window. `starved`: its requests get less than they need, whatever its load is."""
    if load is None or end_s is None or end_s == memory.window_end_s:
        return memory
    if memory.window_end_s is not None and end_s < memory.window_end_s:
        memory = NeedMemory()
    pressed = load.rho is not None and load.rho > rule.rescue_above
    since_s = memory.pressed_since_s if memory.pressed_since_s is not None else end_s
    memory = replace(memory, pressed_since_s=since_s if pressed or starved else None, window_end_s=end_s)
    if memory.watched_since_s is None:
        return replace(memory, watched_since_s=end_s, watched_replicas=load.routable) if pressed else memory
    if end_s - memory.watched_since_s < LOOK_AGAIN_S:
        return memory
    over = load.arriving < OVER_BELOW * memory.watched_replicas
    brief = memory.brief + LEARNING_RATE * ((1.0 if over else 0.0) - memory.brief)
    return replace(memory, brief=brief, watched_since_s=None, watched_replicas=0)
