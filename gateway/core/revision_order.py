"""Which endpoint sets follow one another. Pure: `now_s` is any monotonic seconds."""

from __future__ import annotations

STANDS_BY_S = 10.0
"""An actuator whose store has lost its last writes has written them again long before."""


class RevisionOrder:
    """Revisions of one cluster as they come, out of order: a gateway does not go back to an older one.

    An older one comes from a store that was restored, or on the slower of two ways. It is right in one case: store and
    actuator have both lost their state, and the clock that revisions start from went back as well. So an older one is
    taken when an actuator that holds the lease has kept it for `STANDS_BY_S`, and nothing has confirmed the newer one
    meanwhile. Earlier acknowledgements are then higher than any revision of that actuator, and count for nothing there.
    """

    def __init__(self) -> None:
        self.revision: int | None = None
        """The newest that was taken."""
        self._older_since_s: float | None = None

    def takes(self, revision: int, *, has_leader: bool, now_s: float) -> bool:
        """Whether to route by a set that has come. `has_leader`: an actuator holds the cluster's lease."""
        if self.revision is not None and revision < self.revision:
            if not has_leader:
                return False
            if self._older_since_s is None:
                self._older_since_s = now_s
            if now_s - self._older_since_s < STANDS_BY_S:
                return False
        self.revision = revision
        self._older_since_s = None
        return True

    def confirmed(self) -> None:
        """The newest one was confirmed."""
        self._older_since_s = None
