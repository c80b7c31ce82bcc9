"""The engine's stored records: states of pools and of scaled services, and the desired states of pools.

Each kind has a schema number of its own. What releases before schema numbers wrote is read by `legacy`.
"""

from __future__ import annotations

from typing import Any

from policy_engine.core.pool.decide import Barred, PoolState, UnderWay
from policy_engine.core.pool.gpu_layout import OverlayReplica, Resident
from policy_engine.core.pool.members import MemberMemory
from policy_engine.core.pool.pool_candidates import ReplicaFacts
from policy_engine.core.scaled.decide import RoleReplicas, ScaledState
from policy_engine.core.scaled.stabilise import History
from policy_engine.core.shared.vocabulary import MemberKey
from policy_engine.shell import legacy
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.store.v1 import engine_pb2
from trimtab.config.kinds import ResourceKind
from trimtab.config.resources import KINDS
from trimtab.domain.pool import DesiredPool, desired_from_proto, desired_to_proto
from trimtab.domain.role_signals import RoleSignals
from trimtab.store.message_codec import Form, Rules
from trimtab.store.message_forms import ValueCodec, domain_form
from trimtab.store.records import RecordKind


def _write_history(history: History, message: Any) -> None:
    """As columns: a ring of thousands of pairs is written at every cycle."""
    del message.time_s[:], message.units[:]
    message.time_s.extend([time_s for time_s, _ in history.recommendations])
    message.units.extend([units for _, units in history.recommendations])
    for name in ("last_fit_s", "last_out_s", "last_in_s"):
        value = getattr(history, name)
        if value is None:
            message.ClearField(name)
        else:
            setattr(message, name, value)


def _read_history(message: Any) -> History:
    return History(
        recommendations=tuple(zip(message.time_s, message.units, strict=True)),
        last_fit_s=message.last_fit_s if message.HasField("last_fit_s") else None,
        last_out_s=message.last_out_s if message.HasField("last_out_s") else None,
        last_in_s=message.last_in_s if message.HasField("last_in_s") else None,
    )


def _resource_form(kind: ResourceKind[Any, Any]) -> Form:
    return Form(
        message=kind.message,
        write=lambda resource, message: message.CopyFrom(kind.to_message(resource)),
        read=kind.parse,
    )


RULES = Rules(
    ids={
        Barred: ("replica",),
        MemberKey: ("service", "role"),
        MemberMemory: ("key",),
        OverlayReplica: ("replica",),
        ReplicaFacts: ("replica",),
        Resident: ("replica",),
        RoleReplicas: ("role",),
        RoleSignals: ("role",),
        UnderWay: ("operation",),
    },
    others={RoleSignals: "others"},
    forms={
        History: Form(message=engine_pb2.RecommendationHistory, write=_write_history, read=_read_history),
        **{kind.model: _resource_form(kind) for kind in KINDS},
        DesiredPool: domain_form(
            actuator_pb2.PoolState,
            desired_to_proto,
            desired_from_proto,
            {
                "trimtab.actuator.v1.OverlayReplica": ("replica",),
                "trimtab.actuator.v1.MemberFloor": ("service", "role"),
            },
        ),
    },
)
"""How types of the cores are stored."""


_POOL_STATE = ValueCodec(PoolState, engine_pb2.PoolStateRecord, RULES)
_SCALED_STATE = ValueCodec(ScaledState, engine_pb2.ScaledStateRecord, RULES)
_DESIRED_POOL = ValueCodec(DesiredPool, engine_pb2.DesiredPoolRecord, RULES)

POOL_STATE = RecordKind(
    name="pool state",
    schema=1,
    codec=_POOL_STATE,
    removing="the pool goes on from its desired state, without memory of its members",
    legacy=lambda raw: _POOL_STATE.read(legacy.pool_state(raw)),
)
SCALED_STATE = RecordKind(
    name="state of a scaled service",
    schema=1,
    codec=_SCALED_STATE,
    removing="the service goes on from the replicas that exist",
    legacy=lambda raw: _SCALED_STATE.read(legacy.scaled_state(raw)),
)
DESIRED_POOL = RecordKind(
    name="desired state of a pool",
    schema=1,
    codec=_DESIRED_POOL,
    removing="the pool is laid out anew around the replicas that are awake",
    legacy=lambda raw: _DESIRED_POOL.read(legacy.desired_pool(raw)),
)
