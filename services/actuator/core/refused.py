"""Records in the store that this release cannot read: what is known of them all the same.

A refused record is in no other part of the state. Its content is not known, so what it is about is held
(``actuator.core.held``), and its bytes stay as they are until an operator, or another release, handles them.
"""

from dataclasses import dataclass
from enum import StrEnum


class RefusedKind(StrEnum):
    """Which record it is."""

    REPLICA = "replica"
    POOL = "pool"
    OPERATION = "operation"
    META = "meta"


@dataclass(frozen=True, kw_only=True)
class RefusedRecord:
    """One such record.

    ``name`` is its replica, pool or operation; for META the field. ``reason`` is ``newer`` or ``corrupt``, ``why`` one
    sentence with its key, ``remedy`` what an operator can do.
    """

    kind: RefusedKind
    name: str
    reason: str
    why: str
    remedy: str
    # What its bytes say for certain (they are whole, only not of this release); None and empty when they do not. Of a
    # replica the GPUs it holds, of a pool those of its overlay.
    gpus: tuple[tuple[str, int], ...] | None = None
    pool: str = ""
    group: str = ""
    # An operation's subject, and whether that is certain: the bytes of a damaged record may name the wrong one.
    subject: str = ""
    subject_certain: bool = False

    @property
    def text(self) -> str:
        """One sentence with the place, the fault and the remedy."""
        return f"{self.why}; {self.remedy}"
