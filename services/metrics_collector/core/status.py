"""The state of one target from scrape to scrape, and what is shown of it."""

from dataclasses import dataclass, field, replace

from metrics_collector.core.dialect import Quantity
from metrics_collector.core.sample import PageSample
from metrics_collector.core.series import Series, extend, is_stuck
from metrics_collector.core.targets import Target
from metrics_collector.core.windows import ReplicaWindow
from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2

_MAX_ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStatus:
    """What the scrapes of one target have shown. Times are seconds on the store's clock."""

    state: "pb.TargetState.ValueType" = pb.TARGET_STATE_PENDING
    series: Series = field(default_factory=Series)
    last_success_s: float | None = None
    last_duration_s: float = 0.0
    consecutive_failures: int = 0
    last_error: str = ""

    @property
    def stuck(self) -> bool:
        """Whether its gauges stand while nothing moves."""
        return self.state == pb.TARGET_STATE_STUCK


def succeeded(
    status: TargetStatus, sample: PageSample, *, at_s: float, duration_s: float, keep_s: float, stuck_after_s: float
) -> TargetStatus:
    """A page was read at ``at_s``."""
    series = extend(status.series, sample, at_s=at_s, keep_s=keep_s)
    if sample.awake is False:
        state = pb.TARGET_STATE_ASLEEP
    elif is_stuck(series, stuck_after_s=stuck_after_s):
        state = pb.TARGET_STATE_STUCK
    else:
        state = pb.TARGET_STATE_UP
    error = ""
    if state == pb.TARGET_STATE_STUCK:
        still_s = at_s - series.moved_at_s
        error = f"requests stand in its gauges, but nothing has moved for {still_s:.0f} s"
    elif sample.rejected:
        error = f"{sample.rejected} families refused: values that are not finite, negative, absurd or do not add up"
    return TargetStatus(state=state, series=series, last_success_s=at_s, last_duration_s=duration_s, last_error=error)


def failed(status: TargetStatus, state: "pb.TargetState.ValueType", error: str, *, duration_s: float) -> TargetStatus:
    """A scrape gave no sample. What was read before stays until it leaves the window by age."""
    return replace(
        status,
        state=state,
        last_duration_s=duration_s,
        consecutive_failures=status.consecutive_failures + 1,
        last_error=" ".join(error.split())[:_MAX_ERROR_CHARACTERS],
    )


def rounds_to_skip(consecutive_failures: int, *, interval_s: float, max_backoff_s: float) -> int:
    """How many scrapes a failing target is spared: 0, 1, 3, 7, … within ``max_backoff_s``.

    The first failure costs nothing: one lost scrape is no reason to look away.
    """
    if consecutive_failures < 2:
        return 0
    most = max(0, int(max_backoff_s / interval_s) - 1)
    return int(min(most, 2 ** min(consecutive_failures - 1, 30) - 1))


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
        row.last_success_time.FromMicroseconds(round(status.last_success_s * 1e6))
    return row


def replica_sample(target: Target, status: TargetStatus, window: ReplicaWindow | None) -> pb.ReplicaSample | None:
    """The newest sample of a replica with its signals over ``window``; None before its first page."""
    latest = status.series.latest
    if latest is None:
        return None
    counters = latest.sample.counters
    message = pb.ReplicaSample(
        replica=target.replica,
        service=target.service,
        role=target.role,
        state=status.state,
        prompt_tokens_total=counters.get(Quantity.PROMPT_TOKENS, 0.0),
        generation_tokens_total=counters.get(Quantity.GENERATION_TOKENS, 0.0),
        awake=latest.sample.awake,
    )
    message.sample_time.FromMicroseconds(round(latest.at_s * 1e6))
    quality = _quality(window, stuck=status.stuck)
    for signal, value in () if window is None else window.values():
        measurement = types_pb2.Measurement(quality=quality if value is not None else types_pb2.QUALITY_MISSING)
        if value is not None:
            measurement.value = value
        message.signals.add(signal=signal, measurement=measurement)
    return message


def _quality(window: ReplicaWindow | None, *, stuck: bool) -> "types_pb2.Quality.ValueType":
    if window is None:
        return types_pb2.QUALITY_MISSING
    if stuck:
        return types_pb2.QUALITY_STALE
    if window.reset:
        return types_pb2.QUALITY_RESET
    return types_pb2.QUALITY_WARMING if window.warming else types_pb2.QUALITY_OK
