"""Which servers wait for their neighbours' memory, and that the status says so."""

from __future__ import annotations

import io
from types import SimpleNamespace

import grpc
import pytest
from rich.console import Console

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import policy_pb2
from trimtab.cli.status import fetch_answers, render
from trimtab.views.memory_waits import WaitingForMemory, waiting_for_memory
from trimtab.views.status import Answers

STARTING, ACTIVE, SLEEPING = (
    types_pb2.LIFE_CYCLE_STARTING,
    types_pb2.LIFE_CYCLE_ACTIVE,
    types_pb2.LIFE_CYCLE_SLEEPING,
)


def replica(
    service: str,
    life_cycle: types_pb2.LifeCycle.ValueType,
    *gpus: int,
    node: str = "n0",
    pool: str = "shared",
    cluster: str = "local",
) -> actuator_pb2.Replica:
    return actuator_pb2.Replica(
        replica=f"{service}-{node}-{gpus[0]}",
        service=service,
        life_cycle=life_cycle,
        gpu_indices=gpus,
        node=node,
        pool=pool,
        cluster=cluster,
    )


def waits(
    service: str,
    replicas: tuple[str, ...],
    *neighbours: str,
    pooled: bool | None = None,
    prewarm: bool | None = None,
) -> WaitingForMemory:
    return WaitingForMemory(service=service, replicas=replicas, neighbours=neighbours, pooled=pooled, prewarm=prewarm)


def pool(name: str, *members: str, prewarm: bool | None = None) -> policy_pb2.Pool:
    made = policy_pb2.Pool(
        spec=policy_pb2.PoolSpec(members=[policy_pb2.PoolMember(service=member) for member in members])
    )
    made.metadata.name = name
    if prewarm is not None:
        made.spec.prewarm = prewarm
    return made


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([], []),
        ([replica("chat", ACTIVE, 0), replica("code", SLEEPING, 0)], []),
        ([replica("chat", ACTIVE, 0), replica("code", STARTING, 0)], [waits("code", ("code-n0-0",), "chat")]),
        ([replica("chat", ACTIVE, 0), replica("code", STARTING, 1)], []),
        ([replica("chat", ACTIVE, 0), replica("code", STARTING, 0, node="n1")], []),
        ([replica("chat", ACTIVE, 0), replica("code", STARTING, 0, cluster="far")], []),
        ([replica("chat", SLEEPING, 0), replica("code", STARTING, 0)], []),
        ([replica("chat", STARTING, 0), replica("code", STARTING, 0)], []),
        ([replica("chat", ACTIVE, 0), replica("code", STARTING, 0, pool="")], []),
        (
            [replica("code", ACTIVE, 1), replica("reason", STARTING, 0, 1), replica("chat", ACTIVE, 0)],
            [waits("reason", ("reason-n0-0",), "chat", "code")],
        ),
        (
            [replica(*item) for item in (("chat", ACTIVE, 0), ("chat", ACTIVE, 1), ("code", STARTING, 1, 0))],
            [waits("code", ("code-n0-1",), "chat")],
        ),
    ],
    ids=[
        "nobody",
        "a sleeper",
        "beside an awake one",
        "on a GPU of its own",
        "on another node",
        "in another cluster",
        "beside a sleeper",
        "beside one that starts",
        "in no pool",
        "beside two",
        "beside two of one service",
    ],
)
def test_a_starting_server_waits_for_the_memory_of_who_is_awake_on_its_gpus(
    replicas: list[actuator_pb2.Replica], expected: list[WaitingForMemory]
) -> None:
    assert waiting_for_memory(replicas, None) == expected


WAITS = "code: 1 starting, and waiting for GPU memory that chat uses; "


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        (None, "a transition makes room"),
        ([pool("shared", "chat", "code")], "a transition makes room, or `prewarm: true` in the pool's spec"),
        (
            [pool("other", "reason", prewarm=True), pool("shared", "chat", "code", prewarm=False)],
            "a transition makes room, or `prewarm: true` in the pool's spec",
        ),
        (
            [pool("shared", "chat", "code", prewarm=True)],
            "a transition makes room, or the pool's pre-warming once the load allows it",
        ),
        ([], "it is a member of no pool, so no transition makes room"),
        ([pool("shared", "chat", prewarm=False)], "it is a member of no pool, so no transition makes room"),
    ],
    ids=["not known", "off by default", "off", "on", "no pools", "no longer a member"],
)
def test_pre_warming_is_advised_where_it_is_off_and_would_help(pools: list[policy_pb2.Pool] | None, said: str) -> None:
    (found,) = waiting_for_memory([replica("chat", ACTIVE, 0), replica("code", STARTING, 0)], pools)
    assert str(found) == WAITS + said


@pytest.mark.parametrize("prewarm", [False, True])
def test_nothing_is_advised_where_somebody_else_runs_the_servers(prewarm: bool) -> None:
    pools = [pool("shared", "chat", "code", prewarm=prewarm)]
    (found,) = waiting_for_memory([replica("chat", ACTIVE, 0), replica("code", STARTING, 0)], pools, fixed=True)
    assert str(found) == WAITS + "a transition makes room"


class _Engine:
    """The three answers that a refresh needs of the policy engine; `pools` None is a listing that fails."""

    def __init__(self, pools: list[policy_pb2.Pool] | None) -> None:
        role = policy_pb2.RoleStatus(replicas={"LIFE_CYCLE_STARTING": 1})
        service = policy_pb2.ServiceStatus(service="code", roles=[role])
        self._status = policy_pb2.GetStatusResponse(leader=True, services=[service])
        self._pools = pools

    async def GetStatus(self, *_: object, **__: object) -> policy_pb2.GetStatusResponse:
        return self._status

    async def ListDecisions(self, *_: object, **__: object) -> policy_pb2.ListDecisionsResponse:
        return policy_pb2.ListDecisionsResponse()

    async def ListPools(self, request: policy_pb2.ListPoolsRequest, **_: object) -> policy_pb2.ListPoolsResponse:
        if self._pools is None:
            raise _no_answer()
        position = int(request.page_token or 0)
        rest = str(position + 1) if position + 1 < len(self._pools) else ""
        return policy_pb2.ListPoolsResponse(pools=self._pools[position : position + 1], next_page_token=rest)


def _no_answer() -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


class _Actuator:
    def __init__(self, *, fixed: bool = False) -> None:
        self._fixed = fixed

    async def ListReplicas(self, *_: object, **__: object) -> actuator_pb2.ListReplicasResponse:
        listed = [replica("chat", ACTIVE, 0), replica("code", STARTING, 0)]
        return actuator_pb2.ListReplicasResponse(replicas=listed, fixed=self._fixed)


class _Collector:
    async def ListTargets(self, *_: object, **__: object) -> None:
        raise _no_answer()


@pytest.mark.parametrize(
    ("pools", "pooled", "prewarm"),
    [
        ([pool("other", "reason"), pool("shared", "chat", "code", prewarm=True)], True, True),
        ([pool("other", "reason")], False, None),
        (None, None, None),
    ],
    ids=["on the second page", "in no pool", "no answer"],
)
async def test_a_refresh_asks_the_engine_for_every_pool(
    pools: list[policy_pb2.Pool] | None, pooled: bool | None, prewarm: bool | None
) -> None:
    services = SimpleNamespace(policy=_Engine(pools), actuator=_Actuator(), collector=_Collector())
    picture = await fetch_answers(services)  # type: ignore[arg-type]
    assert list(picture.waiting) == [waits("code", ("code-n0-0",), "chat", pooled=pooled, prewarm=prewarm)]


async def test_a_refresh_hears_from_the_actuator_that_the_servers_are_given() -> None:
    pools = [pool("shared", "chat", "code")]
    services = SimpleNamespace(policy=_Engine(pools), actuator=_Actuator(fixed=True), collector=_Collector())
    picture = await fetch_answers(services)  # type: ignore[arg-type]
    assert list(picture.waiting) == [waits("code", ("code-n0-0",), "chat", pooled=True)]


def test_the_status_says_who_waits_for_whom() -> None:
    picture = Answers(
        status=policy_pb2.GetStatusResponse(leader=True),
        decisions=(),
        waiting=[waits("reason", ("reason-n0-0", "reason-n0-2"), "chat", "code", pooled=True, prewarm=False)],
    )
    shown = Console(file=io.StringIO(), width=200, record=True)
    shown.print(render(picture, width=200))
    assert (
        "reason: 2 starting, and waiting for GPU memory that chat and code use; a transition makes room, or "
        "`prewarm: true` in the pool's spec"
    ) in shown.export_text()
