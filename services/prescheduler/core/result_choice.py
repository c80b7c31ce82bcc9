"""Which result of a request is kept, when one cycle after another serves the same absolute request."""

from prescheduler.core.model import Constraint, Outcome, ServiceResult

_DONE = (Outcome.PLACED, Outcome.REMOVED, Outcome.UNCHANGED)


def settle(previous: ServiceResult | None, new: ServiceResult) -> ServiceResult:
    """``new``, unless ``previous`` is the more definite result of the same decision.

    A decision that was carried out stays so in the cycles that find nothing left to do, and when its request expires
    later; one that was placed in part is not denied because the rest still does not fit.
    """
    if previous is None or previous.decision_id != new.decision_id:
        return new
    if previous.outcome in _DONE and not new.groups:
        if new.outcome is Outcome.UNCHANGED or new.constraint is Constraint.EXPIRED:
            return previous
    elif previous.outcome is Outcome.PARTIAL and new.outcome is Outcome.DENIED:
        return previous
    return new
