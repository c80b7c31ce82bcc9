"""Role windows as the store keeps them, merged into observations as the API gives them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.api.common.v1 import types_pb2
from trimtab.domain import role_merge
from trimtab.domain.observation import observation_to_proto
from trimtab.domain.role_window import role_window_from_proto
from trimtab.domain.time import seconds_of
from trimtab.domain.vocabulary import Role


def merge(partials: Sequence[pb.RolePartial], *, expected: Collection[str] | None = None) -> pb.RoleObservation:
    """What `trimtab.domain.role_merge.merge` makes of these. Raises ValueError as it does, and for an unknown role."""
    windows = [role_window_from_proto(partial) for partial in partials]
    return observation_to_proto(role_merge.merge(windows, expected=expected))


def merge_service(
    partials: Sequence[pb.RolePartial], *, expected: Mapping[Role, Collection[str]] | None = None
) -> pb.RoleObservation:
    """What `trimtab.domain.role_merge.merge_service` makes of these. Raises ValueError as it does."""
    windows = [role_window_from_proto(partial) for partial in partials]
    return observation_to_proto(role_merge.merge_service(windows, expected=expected))


def signal(observation: pb.RoleObservation, wanted: pb.Signal.ValueType) -> types_pb2.Measurement:
    """One signal's measurement; MISSING when the observation does not hold it."""
    for item in observation.signals:
        if item.signal == wanted:
            return item.measurement
    return types_pb2.Measurement(quality=types_pb2.QUALITY_MISSING, detail="not observed")


def window_end_s(observation: pb.RoleObservation) -> float:
    """End of the window: Unix seconds on the store's clock."""
    return seconds_of(observation.window_end)


def age_s(observation: pb.RoleObservation, now_s: float) -> float:
    """Seconds since the window ended; never negative."""
    return max(0.0, now_s - window_end_s(observation))
