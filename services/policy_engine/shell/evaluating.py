"""Dry runs: what the engine would decide now, with the stored policies or with others in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from google.protobuf.field_mask_pb2 import FieldMask

from policy_engine.core.crossrules import check
from policy_engine.core.decision import CoreInput, RecordHeader
from policy_engine.core.pool.decide import decide_pool
from policy_engine.core.pool.desired import residents
from policy_engine.core.pool.gpu_layout import OverlayError
from policy_engine.core.pool.initial_layout import LayoutInput, lay_out
from policy_engine.core.scaled.decide import ScaledInput, decide_scaled
from policy_engine.core.shared.draft import Draft
from policy_engine.shell.catalog import Snapshot
from policy_engine.shell.cycle import Cycle
from policy_engine.shell.engine import Engine
from policy_engine.shell.replay import record_of
from trimtab.api.policy.v1 import policy_pb2
from trimtab.config.kinds import ResourceKind, ResourceSet
from trimtab.config.resources import POOL, SERVICE_POLICY, ResourceError, ServicePolicy
from trimtab.domain.time import timestamp_of
from trimtab.rpc.errors import InvalidRequest, NotFound, Violation
from trimtab.rpc.validate import Violations
from trimtab.store import keys

MAX_OVERRIDES = 256


async def evaluate(
    engine: Engine, kind: ResourceKind[Any, Any], name: str, request: policy_pb2.EvaluateRequest
) -> policy_pb2.EvaluateResponse:
    """One subject's decision as of now. Loops of a pool count as due. Raises InvalidRequest for a kind without any."""
    evaluator = _EVALUATORS.get(kind.name)
    if evaluator is None:
        raise InvalidRequest([Violation("kind", f"is {kind.name}, on which nothing is decided")])
    snapshot = await engine.catalog.refresh()
    snapshot = replace(snapshot, resources=snapshot.resources.beside(_overrides(engine, snapshot, request)))
    return evaluator(engine, name, await engine.look(snapshot, None))


def _overrides(engine: Engine, snapshot: Snapshot, request: policy_pb2.EvaluateRequest) -> ResourceSet:
    """The policies to use instead of stored ones; what could not be applied is not evaluated either."""
    violations = Violations()
    count = len(request.policy_overrides)
    violations.require("policy_overrides", count <= MAX_OVERRIDES, f"has more than {MAX_OVERRIDES} entries")
    names = {override.metadata.name for override in request.policy_overrides}
    violations.require("policy_overrides", len(names) == count, "names a policy twice")
    for position, path in enumerate(request.override_mask.paths):
        known = FieldMask(paths=[path]).IsValidForDescriptor(policy_pb2.ServicePolicy.DESCRIPTOR)
        violations.require(f"override_mask.paths[{position}]", known, "names a field that ServicePolicy does not have")
    masks_nothing = bool(request.override_mask.paths) and not count
    violations.require("policy_overrides", not masks_nothing, "is required with override_mask")
    violations.raise_if_any()
    found: dict[str, ServicePolicy] = {}
    for position, override in enumerate(request.policy_overrides):
        field = f"policy_overrides[{position}]"
        name = override.metadata.name
        merged = override
        if request.override_mask.paths:
            stored = snapshot.messages_of(SERVICE_POLICY).get(name)
            if stored is None:
                raise InvalidRequest([Violation(f"{field}.metadata.name", f"no ServicePolicy {name!r} to change")])
            merged = policy_pb2.ServicePolicy()
            merged.CopyFrom(stored)
            request.override_mask.MergeMessage(override, merged, True, True)
        try:
            found[name] = SERVICE_POLICY.parse(merged)
        except ResourceError as error:
            raise InvalidRequest(
                [Violation(f"{field}.{fault.proto_field}", fault.description) for fault in error.violations]
            ) from error
    overrides = ResourceSet(found.values())
    beside = snapshot.resources.beside(overrides)
    for position, policy in enumerate(found.values()):
        for fault in check(policy, beside, engine.settings.actuators):
            violations.add(f"policy_overrides[{position}].{fault.proto_field}", fault.description)
    violations.raise_if_any()
    return overrides


def _service(engine: Engine, name: str, cycle: Cycle) -> policy_pb2.EvaluateResponse:
    policy = cycle.snapshot.policies.get(name)
    if policy is None:
        raise NotFound(SERVICE_POLICY.missing, f"no ServicePolicy {name!r}")
    home = cycle.snapshot.pool_of(name)
    if home is not None:
        return _pool(engine, home.name, cycle)
    held = engine.memory.why_service_held(name)
    if held:
        return policy_pb2.EvaluateResponse(reason=held)
    given: ScaledInput = engine.scaled.gather(policy, cycle, engine.memory)
    # A dry run shows every clamp, also those that have been recorded already.
    given = replace(given, state=replace(given.state, notes=()))
    result = decide_scaled(given)
    return _answer(result.draft, given, cycle, result.holding or "the signals ask for what there is")


def _pool(engine: Engine, name: str, cycle: Cycle) -> policy_pb2.EvaluateResponse:
    pool = cycle.snapshot.pools.get(name)
    if pool is None:
        raise NotFound(POOL.missing, f"no Pool {name!r}")
    held = engine.memory.why_pool_held(name)
    if held:
        return policy_pb2.EvaluateResponse(reason=held)
    policies = cycle.snapshot.members_of(pool)
    desired = engine.memory.desired.get(name)
    if desired is None:
        birth = LayoutInput(pool, policies, residents=residents(engine.pools.replicas(pool), pool, ()))
        try:
            return _answer(lay_out(birth).draft, birth, cycle, "")
        except OverlayError as error:
            return policy_pb2.EvaluateResponse(reason=str(error))
    given = engine.pools.gather(pool, policies, cycle, engine.memory, engine.pools.unreachable(pool))
    given = replace(given, state=replace(given.state, fast_at_s=None, slow_at_s=None, notes=(), unserved=()))
    result = decide_pool(given)
    return _answer(result.draft, given, cycle, result.holding or "no member needs what another could give")


_EVALUATORS: Final[Mapping[str, Callable[[Engine, str, Cycle], policy_pb2.EvaluateResponse]]] = {
    SERVICE_POLICY.name: _service,
    POOL.name: _pool,
}
"""By the kind's name: what the engine would decide on it."""


def _answer(draft: Draft | None, given: CoreInput, cycle: Cycle, reason: str) -> policy_pb2.EvaluateResponse:
    if draft is None:
        return policy_pb2.EvaluateResponse(reason=reason)
    header = RecordHeader(
        decision_id="",
        decide_time=timestamp_of(cycle.now_s),
        fencing_writer=keys.POLICY_ENGINE,
        fencing_token=0,
    )
    return policy_pb2.EvaluateResponse(decision=record_of(draft, given, header), reason=draft.reason)
