"""PolicyService: the resources, decisions and status of the engine over gRPC.

Reads are served by every process; changes only by the leader, so that rules over several resources hold. A follower
answers UNAVAILABLE with reason NOT_LEADER.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from policy_engine.core.decision import explain, same
from policy_engine.shell.applying import Applier, Assumed
from policy_engine.shell.catalog import POLICIES, POOLS, dressed, pause_field
from policy_engine.shell.engine import Engine
from policy_engine.shell.evaluating import evaluate
from policy_engine.shell.replay import ReplayError, replay
from policy_engine.shell.status import status
from trimtab.api.policy.v1 import policy_pb2, policy_pb2_grpc
from trimtab.rpc.errors import NotFound
from trimtab.rpc.validate import Violations

MAX_PAGE = 500
DEFAULT_PAGE = 50
MAX_RESOURCE_PAGE = 1000

Context = Any


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    """One engine's service. Methods raise `trimtab.rpc.errors`; the server turns them into statuses."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._applier = Applier(engine)

    # Resources

    async def ApplyServicePolicy(
        self, request: policy_pb2.ApplyServicePolicyRequest, context: Context
    ) -> policy_pb2.ApplyServicePolicyResponse:
        """Creates or replaces a policy."""
        _check_request_id(request.request_id)
        return await self.apply_service_policy(request)

    async def apply_service_policy(
        self, request: policy_pb2.ApplyServicePolicyRequest, *, only_if_absent: bool = False
    ) -> policy_pb2.ApplyServicePolicyResponse:
        """The method, callable from within; `only_if_absent` leaves an existing one alone."""
        policy, changed = await self._applier.policy(
            request.service_policy,
            validate_only=request.validate_only,
            only_if_absent=only_if_absent,
            assumed=Assumed.of(request),
        )
        return policy_pb2.ApplyServicePolicyResponse(service_policy=policy, changed=changed)

    async def ApplyPool(self, request: policy_pb2.ApplyPoolRequest, context: Context) -> policy_pb2.ApplyPoolResponse:
        """Creates or replaces a pool."""
        _check_request_id(request.request_id)
        return await self.apply_pool(request)

    async def apply_pool(
        self, request: policy_pb2.ApplyPoolRequest, *, only_if_absent: bool = False
    ) -> policy_pb2.ApplyPoolResponse:
        """The method, callable from within; `only_if_absent` leaves an existing one alone."""
        pool, changed = await self._applier.pool(
            request.pool,
            validate_only=request.validate_only,
            only_if_absent=only_if_absent,
            assumed=Assumed.of(request),
        )
        return policy_pb2.ApplyPoolResponse(pool=pool, changed=changed)

    async def GetServicePolicy(
        self, request: policy_pb2.GetServicePolicyRequest, context: Context
    ) -> policy_pb2.GetServicePolicyResponse:
        """One policy."""
        snapshot = await self.engine.catalog.refresh()
        found = snapshot.policy_protos.get(_name(request.name))
        if found is None:
            raise NotFound("NO_SUCH_POLICY", f"no ServicePolicy {request.name!r}")
        return policy_pb2.GetServicePolicyResponse(service_policy=found)

    async def ListServicePolicies(
        self, request: policy_pb2.ListServicePoliciesRequest, context: Context
    ) -> policy_pb2.ListServicePoliciesResponse:
        """Policies by name."""
        snapshot = await self.engine.catalog.refresh()
        names, token = _page(sorted(snapshot.policy_protos), request.page_size, request.page_token)
        return policy_pb2.ListServicePoliciesResponse(
            service_policies=[snapshot.policy_protos[name] for name in names], next_page_token=token
        )

    async def DeleteServicePolicy(
        self, request: policy_pb2.DeleteServicePolicyRequest, context: Context
    ) -> policy_pb2.DeleteServicePolicyResponse:
        """Ends the management of a service; its replicas stay."""
        await self._applier.delete_policy(_name(request.name), request.etag)
        return policy_pb2.DeleteServicePolicyResponse()

    async def GetPool(self, request: policy_pb2.GetPoolRequest, context: Context) -> policy_pb2.GetPoolResponse:
        """One pool."""
        snapshot = await self.engine.catalog.refresh()
        found = snapshot.pool_protos.get(_name(request.name))
        if found is None:
            raise NotFound("NO_SUCH_POOL", f"no Pool {request.name!r}")
        return policy_pb2.GetPoolResponse(pool=found)

    async def ListPools(self, request: policy_pb2.ListPoolsRequest, context: Context) -> policy_pb2.ListPoolsResponse:
        """Pools by name."""
        snapshot = await self.engine.catalog.refresh()
        names, token = _page(sorted(snapshot.pool_protos), request.page_size, request.page_token)
        return policy_pb2.ListPoolsResponse(pools=[snapshot.pool_protos[name] for name in names], next_page_token=token)

    async def DeletePool(
        self, request: policy_pb2.DeletePoolRequest, context: Context
    ) -> policy_pb2.DeletePoolResponse:
        """Ends the management of a pool; its replicas stay."""
        await self._applier.delete_pool(_name(request.name), request.etag)
        return policy_pb2.DeletePoolResponse()

    async def ListRevisions(
        self, request: policy_pb2.ListRevisionsRequest, context: Context
    ) -> policy_pb2.ListRevisionsResponse:
        """Earlier versions, newest first."""
        kind, name = _subject(request.kind, request.name)
        response = policy_pb2.ListRevisionsResponse()
        paused = pause_field(kind, name) in self.engine.catalog.snapshot.pause_reasons
        if kind == POLICIES:
            for policy in await self.engine.catalog.policies.history(name):
                response.revisions.add(service_policy=dressed(policy, paused=paused))
        else:
            for pool in await self.engine.catalog.pools.history(name):
                response.revisions.add(pool=dressed(pool, paused=paused))
        if not response.revisions:
            raise NotFound("NO_SUCH_RESOURCE", f"no {_kind_words(kind)} {name!r}")
        return response

    async def Rollback(self, request: policy_pb2.RollbackRequest, context: Context) -> policy_pb2.RollbackResponse:
        """Applies an earlier version again."""
        kind, name = _subject(request.kind, request.name)
        violations = Violations()
        violations.require("revision", request.revision > 0, "is required")
        violations.raise_if_any()
        if kind == POLICIES:
            policy = await self.engine.catalog.policies.version(name, request.revision)
            if policy is None:
                raise NotFound("NO_SUCH_REVISION", f"{name!r} has no revision {request.revision} any more")
            applied, _ = await self._applier.policy(policy.message, validate_only=False)
            return policy_pb2.RollbackResponse(resource=policy_pb2.ResourceRevision(service_policy=applied))
        pool = await self.engine.catalog.pools.version(name, request.revision)
        if pool is None:
            raise NotFound("NO_SUCH_REVISION", f"{name!r} has no revision {request.revision} any more")
        applied_pool, _ = await self._applier.pool(pool.message, validate_only=False)
        return policy_pb2.RollbackResponse(resource=policy_pb2.ResourceRevision(pool=applied_pool))

    async def Pause(self, request: policy_pb2.PauseRequest, context: Context) -> policy_pb2.PauseResponse:
        """Keeps the last desired state until it is resumed."""
        kind, name = _subject(request.kind, request.name)
        violations = Violations()
        violations.bounded_string("reason", request.reason, required=False)
        violations.raise_if_any()
        await self._applier.pause(kind, name, request.reason)
        return policy_pb2.PauseResponse()

    async def Resume(self, request: policy_pb2.ResumeRequest, context: Context) -> policy_pb2.ResumeResponse:
        """Ends a pause."""
        kind, name = _subject(request.kind, request.name)
        await self._applier.resume(kind, name)
        return policy_pb2.ResumeResponse()

    # What the engine does

    async def Evaluate(self, request: policy_pb2.EvaluateRequest, context: Context) -> policy_pb2.EvaluateResponse:
        """What would be decided now; nothing is written."""
        kind, name = _subject(request.kind, request.name)
        return await evaluate(self.engine, kind, name, request)

    async def GetStatus(self, request: policy_pb2.GetStatusRequest, context: Context) -> policy_pb2.GetStatusResponse:
        """The last turn's picture."""
        return status(self.engine)

    async def ListDecisions(
        self, request: policy_pb2.ListDecisionsRequest, context: Context
    ) -> policy_pb2.ListDecisionsResponse:
        """Newest first."""
        violations = Violations()
        if request.subject:
            violations.identifier("subject", request.subject)
        violations.require("page_size", request.page_size <= MAX_PAGE, f"must be at most {MAX_PAGE}")
        violations.bounded_string("page_token", request.page_token, required=False)
        violations.raise_if_any()
        size = request.page_size or DEFAULT_PAGE
        found = self.engine.log.newest(subject=request.subject, before=request.page_token, count=size + 1)
        token = found[size - 1].decision_id if len(found) > size else ""
        return policy_pb2.ListDecisionsResponse(decisions=found[:size], next_page_token=token)

    async def WatchDecisions(
        self, request: policy_pb2.WatchDecisionsRequest, context: Context
    ) -> AsyncIterator[policy_pb2.WatchDecisionsResponse]:
        """Past decisions, then each new one and each new outcome."""
        violations = Violations()
        violations.require("replay_last", request.replay_last <= MAX_PAGE, f"must be at most {MAX_PAGE}")
        violations.raise_if_any()

        def snapshot() -> list[policy_pb2.WatchDecisionsResponse]:
            if not request.replay_last:
                return []
            last = self.engine.log.newest(count=request.replay_last)
            return [policy_pb2.WatchDecisionsResponse(decision=record) for record in reversed(last)]

        async for message in self.engine.log.hub.watch(snapshot=snapshot):
            yield message

    async def ExplainDecision(
        self, request: policy_pb2.ExplainDecisionRequest, context: Context
    ) -> policy_pb2.ExplainDecisionResponse:
        """One decision in words, and whether the core makes it again from its inputs."""
        violations = Violations()
        violations.bounded_string("decision_id", request.decision_id, max_length=64)
        violations.raise_if_any()
        record = self.engine.log.get(request.decision_id)
        if record is None:
            raise NotFound("NO_SUCH_DECISION", f"no decision {request.decision_id!r}; the oldest are dropped in time")
        record = await self.engine.log.with_input(record)
        lines = explain(record)
        try:
            matches = same(replay(record), record)
        except ReplayError as error:
            lines.append(f"replay: {error}")
            return policy_pb2.ExplainDecisionResponse(decision=record, lines=lines, not_replayed=str(error))
        lines.append("replay: " + ("the same, bit for bit" if matches else "differs from what was recorded"))
        return policy_pb2.ExplainDecisionResponse(decision=record, lines=lines, replay_matches=matches)


def _check_request_id(request_id: str) -> None:
    violations = Violations()
    violations.bounded_string("request_id", request_id, max_length=128, required=False)
    violations.raise_if_any()


def _name(name: str) -> str:
    violations = Violations()
    violations.identifier("name", name)
    violations.raise_if_any()
    return name


def _subject(kind: int, name: str) -> tuple[str, str]:
    violations = Violations()
    violations.enum_set("kind", kind, policy_pb2.ResourceKind)
    violations.identifier("name", name)
    violations.raise_if_any()
    return (POLICIES if kind == policy_pb2.RESOURCE_KIND_SERVICE_POLICY else POOLS), name


def _kind_words(kind: str) -> str:
    return "ServicePolicy" if kind == POLICIES else "Pool"


def _page(names: list[str], size: int, token: str) -> tuple[list[str], str]:
    violations = Violations()
    violations.require("page_size", size <= MAX_RESOURCE_PAGE, f"must be at most {MAX_RESOURCE_PAGE}")
    violations.bounded_string("page_token", token, required=False)
    violations.raise_if_any()
    rest = [name for name in names if name > token]
    count = size or MAX_PAGE
    return rest[:count], rest[count - 1] if len(rest) > count else ""
