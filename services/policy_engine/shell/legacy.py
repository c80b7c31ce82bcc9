"""What releases before schema numbers kept in the store (schema 1 of the store), read into records of schema 1.

The models are frozen: they describe what those releases wrote, and do not follow the engine's types. States were JSON;
a pool's desired state was the bare message that its actuator gets. Each function raises ValueError, or protobuf's
DecodeError, for bytes that it cannot read.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import decision_pb2, policy_pb2
from trimtab.api.store.v1 import engine_pb2


class _Old(BaseModel):
    """A JSON object; keys that it does not name were of no use any more."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _MemberKey(_Old):
    service: str
    role: str


class _Share(_Old):
    smoothed_tps: float | None = None
    region: str = "NOMINAL"
    window_end_s: float | None = None


class _Output(_Old):
    decode_tps: float = 0.0
    request_rps: float = 0.0
    window_end_s: float | None = None


class _Queue(_Old):
    queued: float | None = None
    window_end_s: float | None = None
    growth_rps: float | None = None


class _Elasticity(_Old):
    exponent: float = 1.5
    before_replicas: int | None = None
    before_z: float | None = None
    before_work: float | None = None


class _Arrivals(_Old):
    arriving: float = 0.0
    longer: float = 0.0
    requests: float = 0.0
    request_rps: float = 0.0
    since_s: float = 0.0
    window_end_s: float | None = None
    recent: tuple[tuple[float, float], ...] = ()


class _Spells(_Old):
    brief: float = 0.0
    pressed_since_s: float | None = None
    watched_since_s: float | None = None
    watched_replicas: int = 0
    window_end_s: float | None = None


class _Member(_Old):
    key: _MemberKey
    share: _Share = _Share()
    received_at_s: float | None = None
    moved_at_s: float | None = None
    moved_to: int | None = None
    output: _Output = _Output()
    queue: _Queue = _Queue()
    elasticity: _Elasticity = _Elasticity()
    arrivals: _Arrivals = _Arrivals()
    spells: _Spells = _Spells()
    was_idle: bool = False
    began_at_s: float | None = None


class _Barred(_Old):
    replica: str
    until_s: float
    failures: int


class _PoolState(_Old):
    members: tuple[_Member, ...]
    barred: tuple[_Barred, ...] = ()
    fast_at_s: float | None = None
    slow_at_s: float | None = None
    notes: tuple[tuple[str, float], ...] = ()
    unserved: tuple[tuple[str, float], ...] = ()
    round: tuple[str, ...] = ()
    round_slow: bool = False


class _History(_Old):
    recommendations: tuple[tuple[float, int], ...] = ()
    last_fit_s: float | None = None
    last_out_s: float | None = None
    last_in_s: float | None = None


class _ScaledState(_Old):
    desired: tuple[tuple[str, int], ...] | None
    history: _History
    queued: float | None = None
    queued_at_s: float | None = None
    notes: tuple[tuple[str, float], ...] = ()


def pool_state(raw: bytes) -> engine_pb2.PoolStateRecord:
    """A pool's state."""
    old = _PoolState.model_validate_json(raw)
    state = engine_pb2.PoolMemory(
        members=[_member(item) for item in old.members],
        barred=[engine_pb2.BarredReplica(**dict(item)) for item in old.barred],
        fast_at_s=old.fast_at_s,
        slow_at_s=old.slow_at_s,
        notes=_notes(old.notes),
        unserved=[engine_pb2.UnservedEvent(event=event, seen_s=seen_s) for event, seen_s in old.unserved],
        round=old.round,
        round_slow=old.round_slow,
    )
    return engine_pb2.PoolStateRecord(schema=1, state=state)


def scaled_state(raw: bytes) -> engine_pb2.ScaledStateRecord:
    """A scaled service's state."""
    old = _ScaledState.model_validate_json(raw)
    history = engine_pb2.RecommendationHistory(
        time_s=[time_s for time_s, _ in old.history.recommendations],
        units=[units for _, units in old.history.recommendations],
        last_fit_s=old.history.last_fit_s,
        last_out_s=old.history.last_out_s,
        last_in_s=old.history.last_in_s,
    )
    state = engine_pb2.ScaledMemory(
        history=history, queued=old.queued, queued_at_s=old.queued_at_s, notes=_notes(old.notes)
    )
    if old.desired is not None:
        state.desired.SetInParent()
        for role, replicas in old.desired:
            state.desired.counts.add(role=_role(role), replicas=replicas)
    return engine_pb2.ScaledStateRecord(schema=1, state=state)


def desired_pool(raw: bytes) -> engine_pb2.DesiredPoolRecord:
    """A pool's desired state. Raises ValueError for one without pool or revision."""
    state = actuator_pb2.PoolState.FromString(raw)
    if not state.pool or not state.state_revision:
        raise ValueError("names no pool and no revision")
    return engine_pb2.DesiredPoolRecord(schema=1, state=state)


def _member(old: _Member) -> engine_pb2.MemberMemory:
    arrivals: dict[str, Any] = dict(old.arrivals) | {
        "recent": [engine_pb2.ArrivedWork(window_end_s=end_s, work=work) for end_s, work in old.arrivals.recent]
    }
    share: dict[str, Any] = dict(old.share) | {"region": policy_pb2.Region.Value(f"REGION_{old.share.region}")}
    return engine_pb2.MemberMemory(
        key=engine_pb2.MemberKey(service=old.key.service, role=_role(old.key.role)),
        share=engine_pb2.ShareMemory(**share),
        received_at_s=old.received_at_s,
        moved_at_s=old.moved_at_s,
        moved_to=old.moved_to,
        output=engine_pb2.OutputMemory(**dict(old.output)),
        queue=engine_pb2.QueueMemory(**dict(old.queue)),
        elasticity=engine_pb2.ElasticityMemory(**dict(old.elasticity)),
        arrivals=engine_pb2.ArrivalMemory(**arrivals),
        spells=engine_pb2.SpellMemory(**dict(old.spells)),
        was_idle=old.was_idle,
        began_at_s=old.began_at_s,
    )


def _notes(old: tuple[tuple[str, float], ...]) -> list[engine_pb2.HoldNote]:
    return [
        engine_pb2.HoldNote(kind=decision_pb2.ClampKind.Value(f"CLAMP_KIND_{kind}"), seen_s=seen_s)
        for kind, seen_s in old
    ]


def _role(old: str) -> types_pb2.Role.ValueType:
    return types_pb2.Role.Value(f"ROLE_{old.upper().replace('-', '_')}")
