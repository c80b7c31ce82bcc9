"""What the scrapes of one target have shown, and the state that follows."""

from dataclasses import dataclass

from metrics_collector.core.targets import Target
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.domain.time import timestamp_of

_MAX_ERROR_CHARACTERS = 300


@dataclass(slots=True, kw_only=True)
class TargetStatus:
    """Updated in place by each scrape and each round. Times are seconds on the store's clock.

    ``verdict`` is the state by the newest window of a server that answers: UP, ASLEEP or STUCK, with ``reason``.
    ``failure`` is DOWN or BAD_PAGE while scrapes fail, else unspecified.
    """

    last_success_s: float | None = None
    last_duration_s: float = 0.0
    consecutive_failures: int = 0
    failure: "pb.TargetState.ValueType" = pb.TARGET_STATE_UNSPECIFIED
    error: str = ""
    rejected: int = 0
    verdict: "pb.TargetState.ValueType" = pb.TARGET_STATE_UP
    reason: str = ""
    still: bool = False
    """Whether its counters stood in the newest window, or it sleeps."""

    @property
    def state(self) -> "pb.TargetState.ValueType":
        """The target's state."""
        if self.failure != pb.TARGET_STATE_UNSPECIFIED:
            return self.failure
        return pb.TARGET_STATE_PENDING if self.last_success_s is None else self.verdict

    @property
    def last_error(self) -> str:
        """One line on what is wrong, empty for nothing."""
        if self.failure != pb.TARGET_STATE_UNSPECIFIED:
            return self.error
        if self.reason:
            return self.reason
        if self.rejected:
            families = "1 family" if self.rejected == 1 else f"{self.rejected} families"
            return f"{families} refused: values that are not finite, negative, absurd or do not add up"
        return ""

    def succeeded(self, *, at_s: float, duration_s: float, rejected: int, asleep: bool) -> None:
        """A page was read at ``at_s``."""
        self.last_success_s = at_s
        self.last_duration_s = duration_s
        self.rejected = rejected
        if self.consecutive_failures:
            self.consecutive_failures = 0
            self.failure = pb.TARGET_STATE_UNSPECIFIED
            self.error = ""
        # Falling asleep and waking show at once; other changes need a window.
        if asleep != (self.verdict == pb.TARGET_STATE_ASLEEP):
            self.verdict = pb.TARGET_STATE_ASLEEP if asleep else pb.TARGET_STATE_UP
            self.reason = ""

    def failed(self, state: "pb.TargetState.ValueType", error: str, *, duration_s: float) -> None:
        """A scrape gave nothing. What was read before stays until it leaves the window by age."""
        self.failure = state
        self.error = " ".join(error.split())[:_MAX_ERROR_CHARACTERS]
        self.last_duration_s = duration_s
        self.consecutive_failures += 1

    def judged(self, verdict: "pb.TargetState.ValueType", reason: str) -> None:
        """A window has been closed."""
        self.verdict = verdict
        self.reason = reason[:_MAX_ERROR_CHARACTERS]


def describe_target(target: Target, status: TargetStatus) -> pb.Target:
    """A row of ListTargets."""
    row = pb.Target(
        target_id=target.target_id,
        address=target.address,
        service=target.service,
        role=target.role,
        replica=target.replica,
        cluster=target.cluster,
        gpus=target.gpus,
        source=target.source,
        counted=target.counted,
        state=status.state,
        last_duration_s=status.last_duration_s,
        consecutive_failures=status.consecutive_failures,
        last_error=status.last_error if target.address else "it has no address yet",
    )
    if status.last_success_s is not None:
        row.last_success_time.CopyFrom(timestamp_of(status.last_success_s))
    return row
