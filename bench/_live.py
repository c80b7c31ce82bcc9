"""A fleet of simulated servers behind the real gateway, as processes: what ``bench.agreement`` measures live."""

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import yaml

from simulator.core.profile import Profile
from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.cli.addresses import LocalAddresses
from trimtab.cli.local import LocalStack, check_ports, lock_folder, make_state_folders, wait_until
from trimtab.cli.supervisor import Supervisor

READY_S = 120.0
NODE = "node-0"


@dataclass(frozen=True, kw_only=True)
class LiveServer:
    """One server of the fleet; ``gpus`` are its indices on the only node."""

    name: str
    role: str
    gpus: tuple[int, ...]


@asynccontextmanager
async def live_fleet(
    folder: Path, profile: Profile, servers: Sequence[LiveServer], *, service: str, port_base: int, stream_interval: int
) -> AsyncIterator[str]:
    """The gateway's URL once store, fleet, actuator and gateway are up and every server is routable.

    Raises CommandError or ChildError when something does not come up.
    """
    lock_folder(folder)
    make_state_folders(folder)
    stack = LocalStack(
        addresses=LocalAddresses(port_base=port_base),
        state_folder=folder,
        topology=folder / "topology.yaml",
        targets=folder / "targets.yaml",
        bring_up_scale=0.0,
        stream_interval=stream_interval,
        log_level="warning",
    )
    gpus = 1 + max(index for server in servers for index in server.gpus)
    memory_gib = profile.memory.awake_gib + 1.0
    node = {"node": NODE, "gpuType": profile.gpu_type, "gpus": gpus, "gpuMemoryGib": memory_gib}
    topology = {"apiVersion": "trimtab.dev/v1", "kind": "Topology", "metadata": {"name": "agreement"}}
    stack.topology.write_text(yaml.safe_dump(topology | {"spec": {"nodes": [node]}}))
    check_ports(stack.addresses)
    supervisor = Supervisor(stack.log_folder, on_event=lambda text: print(text, file=sys.stderr))
    try:
        await supervisor.start([stack.store(), stack.fleet()], timeout_s=READY_S)
        groups = [await _create(stack, profile, server, service) for server in servers]
        (folder / "targets.yaml").write_text(yaml.safe_dump(groups))
        wanted = ("actuator", "gateway")
        await supervisor.start([spec for spec in stack.services() if spec.name in wanted], timeout_s=READY_S)
        await _await_routable(stack, len(servers))
        yield stack.addresses.url("gateway")
    finally:
        await supervisor.stop()


async def _create(stack: LocalStack, profile: Profile, server: LiveServer, service: str) -> dict[str, Any]:
    """Start one server; its group in the targets' document."""
    body = {
        "replica": server.name,
        "service": service,
        "role": server.role,
        "model": profile.model,
        "profile": profile.name,
        "node": NODE,
        "gpu_indices": list(server.gpus),
    }
    admin = stack.addresses.url("fleet")
    async with aiohttp.ClientSession() as session:
        async with session.post(admin + "/replicas", json=body) as reply:
            text = await reply.text()
            if reply.status not in (200, 201):
                raise RuntimeError(f"the fleet did not take {server.name}: {reply.status} {text}")
        found: dict[str, Any] = {}

        async def missing() -> str:
            found.update(await _replica(session, admin, server.name))
            return "" if found["state"] == "running" else f"{server.name} is {found['state']}"

        await wait_until(missing, timeout_s=READY_S, poll_s=0.1)
    labels = {
        "service": service,
        "role": server.role,
        "model": profile.model,
        "replica": server.name,
        "node": NODE,
        "gpu_indices": ",".join(str(index) for index in server.gpus),
    }
    return {"targets": [str(found["address"]).removeprefix("http://")], "labels": labels}


async def _replica(session: aiohttp.ClientSession, admin: str, name: str) -> dict[str, Any]:
    async with session.get(f"{admin}/replicas/{name}") as reply:
        found: dict[str, Any] = json.loads(await reply.text())
    return found


async def _await_routable(stack: LocalStack, count: int) -> None:
    async with grpc.aio.insecure_channel(stack.addresses.address("actuator")) as channel:
        stub = actuator_pb2_grpc.ActuatorServiceStub(channel)

        async def missing() -> str:
            reply = await stub.ListReplicas(actuator_pb2.ListReplicasRequest(), timeout=2.0)
            routable = sum(replica.routable for replica in reply.replicas)
            return "" if routable == count else f"{routable} of {count} servers are routable"

        await wait_until(missing, timeout_s=READY_S)
