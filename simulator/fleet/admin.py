"""The fleet's admin API over HTTP and JSON; docs/simulator.md lists its routes.

Errors are `{"error": text}`: 400 for a body that does not parse or fits no node, 404 for an unknown replica, 409 for a
name or a GPU that is taken.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Annotated

import pydantic
from aiohttp import web

from simulator.fleet.fleet import Fleet
from simulator.fleet.metrics import FleetMetrics
from simulator.fleet.model import ConflictError, FleetConfigError, ReplicaSpec, first_violation
from simulator.fleet.replica import Replica
from simulator.scenarios import Scenario
from simulator.server.faults import Fault
from simulator.server.server import ServerStats

FLEET_KEY: web.AppKey[Fleet] = web.AppKey("fleet", Fleet)
METRICS_KEY: web.AppKey[FleetMetrics] = web.AppKey("metrics", FleetMetrics)
SCENARIO_KEY: web.AppKey[Scenario] = web.AppKey("scenario", Scenario)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _FaultBody(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    fault: Fault
    seconds: Annotated[float, pydantic.Field(gt=0, le=86_400)] | None = None
    """The fault heals by itself after this time; None: it stays."""


class _NotFoundError(LookupError):
    pass


def _json(body: object, status: int = 200) -> web.Response:
    return web.json_response(body, status=status, dumps=lambda o: json.dumps(o, separators=(",", ":")))


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into their status and `{"error": …}`."""
    try:
        return await handler(request)
    except pydantic.ValidationError as error:
        return _json({"error": first_violation(error)}, 400)
    except FleetConfigError as error:
        return _json({"error": str(error)}, 400)
    except ConflictError as error:
        return _json({"error": str(error)}, 409)
    except _NotFoundError as error:
        return _json({"error": str(error)}, 404)
    except web.HTTPException as error:
        return _json({"error": error.reason}, error.status)


def replica_body(fleet: Fleet, replica: Replica) -> dict[str, object]:
    """A replica as the API shows it."""
    spec = replica.spec
    return {
        "replica": spec.replica,
        "service": spec.service,
        "role": spec.role,
        "model": spec.model,
        "address": f"http://{fleet.settings.advertise_host}:{replica.port}",
        "node": spec.node,
        "gpu_indices": list(spec.gpu_indices),
        "profile": replica.profile.name,
        "state": replica.state.value,
        "message": replica.message,
        "restarts": replica.restarts,
        "start_time": replica.start_time_s,
        "labels": dict(spec.labels),
        "revision": replica.revision,
        "hbm_used_gib": round(fleet.memory.held_gib(spec.replica), 3),
        "wake_called_at": replica.server.wake_called_s if replica.server is not None else None,
        "host_memory_gib": round(replica.host_memory_gib, 3),
    }


async def healthz(request: web.Request) -> web.Response:
    """GET /healthz: the fleet answers; shows the scales it runs with."""
    settings = request.app[FLEET_KEY].settings
    return _json({"status": "ok", "scales": dataclasses.asdict(settings.scales)})


async def get_scenario(request: web.Request) -> web.Response:
    """GET /scenario: the bundled scenario that the fleet runs, with its resources as YAML; 404 without one."""
    scenario = request.app.get(SCENARIO_KEY)
    if scenario is None:
        raise _NotFoundError("the fleet runs no scenario")
    return _json({"scenario": scenario.name, "resources": dict(scenario.resources)})


async def get_nodes(request: web.Request) -> web.Response:
    """GET /nodes."""
    fleet = request.app[FLEET_KEY]
    nodes = [
        {
            "node": node.node,
            "cluster": node.cluster,
            "vdc": node.vdc,
            "s2": node.s2,
            "s1": node.s1,
            "gpu_type": node.gpu_type,
            "gpus": node.gpus,
            "gpu_memory_gib": node.memory_gib,
            "free_gpu_indices": fleet.free_gpu_indices(node),
        }
        for node in fleet.nodes.values()
    ]
    return _json({"nodes": nodes})


async def get_replicas(request: web.Request) -> web.Response:
    """GET /replicas."""
    fleet = request.app[FLEET_KEY]
    replicas = [replica_body(fleet, replica) for _, replica in sorted(fleet.replicas.items())]
    return _json({"replicas": replicas, "revision": fleet.revision})


async def get_replica(request: web.Request) -> web.Response:
    """GET /replicas/{replica}."""
    return _json(replica_body(request.app[FLEET_KEY], _replica(request)))


async def post_replica(request: web.Request) -> web.Response:
    """POST /replicas: 201 when new, 200 when it is there already with this spec."""
    fleet = request.app[FLEET_KEY]
    replica, new = fleet.create(ReplicaSpec.model_validate_json(await request.read()))
    return _json(replica_body(fleet, replica), 201 if new else 200)


async def delete_replica(request: web.Request) -> web.Response:
    """DELETE /replicas/{replica}: answers when the server has ended."""
    name = request.match_info["replica"]
    if not await request.app[FLEET_KEY].delete(name):
        raise _NotFoundError(f"replica {name!r} is not known")
    return _json({"replica": name})


async def get_gpus(request: web.Request) -> web.Response:
    """GET /gpus: memory in use, as DCGM would measure it."""
    fleet = request.app[FLEET_KEY]
    gpus = [
        {
            "node": gpu.node,
            "index": gpu.index,
            "memory_gib": capacity_gib,
            "used_gib": round(fleet.memory.used_gib(gpu), 3),
            "awake_replicas": fleet.awake_replicas(gpu),
        }
        for gpu, capacity_gib in sorted(fleet.memory.capacity_gib.items())
    ]
    return _json({"gpus": gpus})


async def get_replica_stats(request: web.Request) -> web.Response:
    """GET /replicas/{replica}/stats: counters of the server that runs now."""
    replica = _replica(request)
    stats = replica.server.stats if replica.server is not None else ServerStats()
    return _json(dataclasses.asdict(stats))


async def get_stats(request: web.Request) -> web.Response:
    """GET /stats: counters over every server that ever lived, by service."""
    fleet = request.app[FLEET_KEY]
    services = {name: dataclasses.asdict(stats) for name, stats in fleet.stats_by_service().items()}
    return _json({"services": services, "gpu_seconds_awake": fleet.gpu_seconds_awake()})


async def post_fault(request: web.Request) -> web.Response:
    """POST /replicas/{replica}/fault; 409 while no server runs."""
    replica = _replica(request)
    body = _FaultBody.model_validate_json(await request.read())
    if not replica.set_fault(body.fault):
        raise ConflictError(f"replica {replica.spec.replica!r} is {replica.state.value}: no server runs")
    if body.seconds is not None and body.fault not in (Fault.NONE, Fault.CRASH):
        asyncio.get_running_loop().call_later(body.seconds, _heal, replica, body.fault)
    return _json({"replica": replica.spec.replica, "fault": body.fault.value})


async def get_metrics(request: web.Request) -> web.Response:
    """GET /metrics of the fleet itself."""
    body = request.app[METRICS_KEY].render()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _heal(replica: Replica, fault: Fault) -> None:
    if replica.server is not None and replica.server.fault is fault:
        replica.set_fault(Fault.NONE)


def _replica(request: web.Request) -> Replica:
    name = request.match_info["replica"]
    replica = request.app[FLEET_KEY].replicas.get(name)
    if replica is None:
        raise _NotFoundError(f"replica {name!r} is not known")
    return replica


def make_admin_app(fleet: Fleet, scenario: Scenario | None = None) -> web.Application:
    """The admin application."""
    app = web.Application(middlewares=[errors])
    app[FLEET_KEY] = fleet
    if scenario is not None:
        app[SCENARIO_KEY] = scenario
    app[METRICS_KEY] = FleetMetrics(fleet)
    router = app.router
    router.add_get("/healthz", healthz)
    router.add_get("/scenario", get_scenario)
    router.add_get("/nodes", get_nodes)
    router.add_get("/gpus", get_gpus)
    router.add_get("/replicas", get_replicas)
    router.add_post("/replicas", post_replica)
    router.add_get("/replicas/{replica}", get_replica)
    router.add_delete("/replicas/{replica}", delete_replica)
    router.add_get("/replicas/{replica}/stats", get_replica_stats)
    router.add_post("/replicas/{replica}/fault", post_fault)
    router.add_get("/stats", get_stats)
    router.add_get("/metrics", get_metrics)
    return app
