"""PolicyService: the resources, decisions and status of the engine over gRPC.

Reads are served by every process; changes only by the leader, so that rules over several resources hold. A follower
answers UNAVAILABLE with reason NOT_LEADER.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from policy_engine.core.decision import explain, same
from policy_engine.shell.applying import Applier, assumed_in, known
from policy_engine.shell.catalog import dressed, pause_field
from policy_engine.shell.engine import Engine
from policy_engine.shell.evaluating import evaluate
from policy_engine.shell.replay import ReplayError, replay
from policy_engine.shell.status import status
from trimtab.api.policy.v1 import policy_pb2
from trimtab.config.kinds import Resource, ResourceKind
from trimtab.config.resources import KINDS, kind_of
from trimtab.rpc.errors import NotFound
from trimtab.rpc.validate import Violations

MAX_PAGE = 500
DEFAULT_PAGE = 50
MAX_RESOURCE_PAGE = 1000

Context = Any
Kind = ResourceKind[Any, Any]


class PolicyServicer:
    """One engine's service. Methods raise `trimtab.rpc.errors`; the server turns them into statuses.

    `Apply…`, `Get…`, `List…` and `Delete…` are there for every kind of the registry, by the names that it gives them.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._applier = Applier(engine)
        for kind in KINDS:
            setattr(self, kind.method("Apply").name, partial(self._apply, kind))
            setattr(self, kind.method("Get").name, partial(self._get, kind))
            setattr(self, kind.method("List").name, partial(self._list, kind))
            setattr(self, kind.method("Delete").name, partial(self._delete, kind))

    # Resources

    async def _apply(self, kind: Kind, request: Any, context: Context) -> Any:
        """Creates or replaces a resource."""
        violations = Violations()
        violations.bounded_string("request_id", request.request_id, max_length=128, required=False)
        violations.raise_if_any()
        resource, changed = await self._applier.apply(
            kind,
            getattr(request, kind.field),
            validate_only=request.validate_only,
            assumed=assumed_in(request),
        )
        return kind.method("Apply").response(**{kind.field: resource}, changed=changed)

    async def apply_if_absent(self, resource: Resource) -> None:
        """Creates a resource, and leaves an existing one of its name alone."""
        kind = kind_of(resource)
        if resource.name in (await self.engine.catalog.refresh()).resources.of(kind):
            return
        await self._applier.apply(kind, kind.to_message(resource), only_if_absent=True)

    async def _get(self, kind: Kind, request: Any, context: Context) -> Any:
        """One resource."""
        found = known(await self.engine.catalog.refresh(), kind, _name(request.name))
        return kind.method("Get").response(**{kind.field: found})

    async def _list(self, kind: Kind, request: Any, context: Context) -> Any:
        """Resources of one kind by name."""
        found = (await self.engine.catalog.refresh()).messages_of(kind)
        names, token = _page(sorted(found), request.page_size, request.page_token)
        content = {kind.plural_field: [found[name] for name in names]}
        return kind.method("List").response(**content, next_page_token=token)

    async def _delete(self, kind: Kind, request: Any, context: Context) -> Any:
        """Ends the management of a service or pool; its replicas stay."""
        await self._applier.delete(kind, _name(request.name), request.etag)
        return kind.method("Delete").response()

    async def ListRevisions(
        self, request: policy_pb2.ListRevisionsRequest, context: Context
    ) -> policy_pb2.ListRevisionsResponse:
        """Earlier versions, newest first."""
        kind, name = _subject(request.kind, request.name)
        response = policy_pb2.ListRevisionsResponse()
        paused = pause_field(kind, name) in self.engine.catalog.snapshot.pause_reasons
        for document in await self.engine.catalog.documents(kind).history(name):
            response.revisions.append(_revision(kind, dressed(document, paused=paused)))
        if not response.revisions:
            raise NotFound("NO_SUCH_RESOURCE", f"no {kind.name} {name!r}")
        return response

    async def Rollback(self, request: policy_pb2.RollbackRequest, context: Context) -> policy_pb2.RollbackResponse:
        """Applies an earlier version again."""
        kind, name = _subject(request.kind, request.name)
        violations = Violations()
        violations.require("revision", request.revision > 0, "is required")
        violations.raise_if_any()
        document = await self.engine.catalog.documents(kind).version(name, request.revision)
        if document is None:
            raise NotFound("NO_SUCH_REVISION", f"{name!r} has no revision {request.revision} any more")
        applied, _ = await self._applier.apply(kind, document.message)
        return policy_pb2.RollbackResponse(resource=_revision(kind, applied))

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
        """The state of the last cycle."""
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
        """One decision as text, and whether the core makes it again from its inputs."""
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


def _name(name: str) -> str:
    violations = Violations()
    violations.identifier("name", name)
    violations.raise_if_any()
    return name


def _subject(number: int, name: str) -> tuple[Kind, str]:
    violations = Violations()
    violations.enum_set("kind", number, policy_pb2.ResourceKind)
    violations.identifier("name", name)
    violations.raise_if_any()
    return next(kind for kind in KINDS if kind.number == number), name


def _revision(kind: Kind, message: Any) -> policy_pb2.ResourceRevision:
    content: dict[str, Any] = {kind.field: message}
    return policy_pb2.ResourceRevision(**content)


def _page(names: list[str], size: int, token: str) -> tuple[list[str], str]:
    violations = Violations()
    violations.require("page_size", size <= MAX_RESOURCE_PAGE, f"must be at most {MAX_RESOURCE_PAGE}")
    violations.bounded_string("page_token", token, required=False)
    violations.raise_if_any()
    rest = [name for name in names if name > token]
    count = size or MAX_PAGE
    return rest[:count], rest[count - 1] if len(rest) > count else ""
