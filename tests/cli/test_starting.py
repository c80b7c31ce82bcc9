"""Which servers wait for their neighbours' memory, and that the status says so."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.common.v1 import types_pb2
from trimtab.api.policy.v1 import policy_pb2
from trimtab.cli.starting import WaitingForMemory, waiting_for_memory
from trimtab.cli.status import Picture, render

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


def waits(service: str, replicas: tuple[str, ...], *neighbours: str) -> WaitingForMemory:
    return WaitingForMemory(service=service, replicas=replicas, neighbours=neighbours)


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
    assert waiting_for_memory(replicas) == expected


def test_the_status_says_who_waits_for_whom() -> None:
    picture = Picture(
        status=policy_pb2.GetStatusResponse(leader=True),
        decisions=(),
        waiting=[waits("reason", ("reason-n0-0", "reason-n0-2"), "chat", "code")],
    )
    shown = Console(file=io.StringIO(), width=200, record=True)
    shown.print(render(picture, width=200))
    assert (
        "reason: 2 starting, and waiting for GPU memory that chat and code use; a transition makes room, or "
        "`prewarm: true` in the pool's spec"
    ) in shown.export_text()
