"""The HTTP application around a simulated server: vLLM's routes, their answers and their errors.

What each route does is described in docs/simulator.md; the shapes are those of vLLM 0.32 started with
`VLLM_SERVER_DEV_MODE=1` and `--enable-server-load-tracking`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Literal

import pydantic
from aiohttp import web

from simulator.server.completions import answer
from simulator.server.faults import Fault, malform
from simulator.server.openai_answers import VERSION, models_body
from simulator.server.openai_api import ApiError, parse_call, parse_tokenize, validation_error
from simulator.server.server import SimulatedServer

SERVER_KEY: web.AppKey[SimulatedServer] = web.AppKey("server", SimulatedServer)
MAX_BODY_BYTES = 32 * 2**20
_UNCOUNTED = frozenset({"/health", "/metrics", "/metrics/", "/version", "/load", "/ping"})
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS_FORMAT = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _SleepQuery(pydantic.BaseModel):
    level: Annotated[int, pydantic.Field(ge=0, le=2)] = 1
    mode: Literal["abort", "wait", "keep"] = "abort"


def json_response(body: object, status: int = 200) -> web.Response:
    """A JSON answer without blanks, as FastAPI writes it."""
    text = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"))
    return web.Response(body=text.encode(), status=status, headers={"Content-Type": "application/json"})


@web.middleware
async def surface(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Apply faults, turn errors into vLLM's bodies and count the request."""
    server = request.app[SERVER_KEY]
    started_s = asyncio.get_running_loop().time()
    while server.fault is Fault.HUNG:
        await server.fault_changed.wait()
    response: web.StreamResponse
    try:
        if server.fault is Fault.HTTP_500:
            response = web.Response(status=500, text="Internal Server Error")
        else:
            response = await handler(request)
    except ApiError as error:
        response = json_response(error.body(), error.status)
    except web.HTTPMethodNotAllowed:
        response = json_response({"detail": "Method Not Allowed"}, 405)
    except web.HTTPNotFound:
        response = json_response({"detail": "Not Found"}, 404)
    except web.HTTPRequestEntityTooLarge:
        refusal = ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.", "BadRequestError")
        response = json_response(refusal.body(), refusal.status)
    path = request.path
    if path not in _UNCOUNTED:
        resource = request.match_info.route.resource
        server.http_metrics.record(
            resource.canonical if resource is not None else "none",
            request.method,
            response.status,
            asyncio.get_running_loop().time() - started_s,
            request_bytes=request.content_length or 0,
            response_bytes=response.content_length or 0,
            now_s=time.time(),
        )
    return response


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await _generate(request, chat=False)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await _generate(request, chat=True)


async def _generate(request: web.Request, *, chat: bool) -> web.StreamResponse:
    server = request.app[SERVER_KEY]
    call = parse_call(await request.read(), chat=chat)
    server.load += 1
    try:
        return await answer(server, request, call)
    finally:
        server.load -= 1


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: counts a prompt as the engine does."""
    server = request.app[SERVER_KEY]
    token_ids = parse_tokenize(await request.read())
    body = {
        "count": len(token_ids),
        "max_model_len": server.limits.max_model_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    return json_response(body)


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    server = request.app[SERVER_KEY]
    settings = server.settings
    body = models_body(
        (settings.model_name,), settings.profile.model, settings.profile.limits.max_model_len, int(server.started_s)
    )
    return json_response(body)


async def health(request: web.Request) -> web.Response:
    """GET /health: 200 also while asleep and with an engine that makes no progress."""
    return web.Response()


async def version(request: web.Request) -> web.Response:
    """GET /version."""
    return json_response({"version": VERSION})


async def load(request: web.Request) -> web.Response:
    """GET /load: requests being answered, those that wait at a sleeping server included."""
    return json_response({"server_load": request.app[SERVER_KEY].load})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: the whole page, whatever the client accepts."""
    server = request.app[SERVER_KEY]
    page = server.page.render()
    if server.fault is Fault.MALFORMED_METRICS:
        page = malform(page)
    return web.Response(body=page.encode(), headers={"Content-Type": _TEXT_FORMAT})


async def metrics_mount(request: web.Request) -> web.Response:
    """GET /metrics/: honours `name[]`, gzip and OpenMetrics."""
    server = request.app[SERVER_KEY]
    names = request.query.getall("name[]", []) or None
    openmetrics = "application/openmetrics-text" in request.headers.get("Accept", "")
    if openmetrics:
        page = server.page.render_openmetrics(names)
    elif names is not None:
        page = server.page.render_filtered(names)
    else:
        page = server.page.render()
    if server.fault is Fault.MALFORMED_METRICS:
        page = malform(page)
    headers = {"Content-Type": _OPENMETRICS_FORMAT if openmetrics else _TEXT_FORMAT}
    body = page.encode()
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        headers["Content-Encoding"] = "gzip"
        body = gzip.compress(body, compresslevel=1)
    return web.Response(body=body, headers=headers)


async def sleep(request: web.Request) -> web.Response:
    """POST /sleep?level=&mode=: answers when asleep."""
    query = _query(_SleepQuery, request)
    await _to_the_end(request.app[SERVER_KEY].sleep(query.level, query.mode))
    return json_response({"status": "sleeping", "level": query.level})


async def wake_up(request: web.Request) -> web.Response:
    """POST /wake_up?tags=: answers when awake, or with `sleeping` after a partial wake."""
    server = request.app[SERVER_KEY]
    tags = tuple(request.query.getall("tags", [])) or None
    await _to_the_end(server.wake(tags))
    status = "sleeping" if server.sleep_state.is_sleeping else "awake"
    return json_response({"status": status, "tags": list(tags) if tags is not None else None})


async def is_sleeping(request: web.Request) -> web.Response:
    """GET /is_sleeping: true also after /pause."""
    return json_response({"is_sleeping": request.app[SERVER_KEY].sleep_state.is_sleeping})


async def is_paused(request: web.Request) -> web.Response:
    """GET /is_paused."""
    return json_response({"is_paused": request.app[SERVER_KEY].sleep_state.paused})


async def pause(request: web.Request) -> web.Response:
    """POST /pause?mode=."""
    await _to_the_end(request.app[SERVER_KEY].pause(_query(_SleepQuery, request).mode))
    return json_response({"status": "paused"})


async def resume(request: web.Request) -> web.Response:
    """POST /resume."""
    await _to_the_end(request.app[SERVER_KEY].resume())
    return json_response({"status": "resumed"})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """POST /reset_prefix_cache?reset_running_requests=: drops nothing while blocks are held, and answers 200."""
    running_too = request.query.get("reset_running_requests", "").lower() in ("true", "1", "yes", "on", "t", "y")
    return json_response({"success": request.app[SERVER_KEY].reset_prefix_cache(running_too=running_too)})


async def collective_rpc(request: web.Request) -> web.Response:
    """POST /collective_rpc: loads the weights again that a sleep of level 2 threw away; no other method."""
    try:
        body = await request.json()
    except ValueError as error:
        raise ApiError(400, f"JSON decode error: {error}", "Bad Request") from error
    if not isinstance(body, dict):
        raise ApiError(400, "Request body must be a JSON object", "Bad Request")
    method = body.get("method")
    if method is None:
        raise ApiError(400, "Missing 'method' in request body", "Bad Request")
    if method != "reload_weights":
        raise ApiError(500, f"the simulated server has no method {method}", "InternalServerError")
    await _to_the_end(request.app[SERVER_KEY].reload_weights())
    return json_response({"results": [None]})


def _query(kind: type[_SleepQuery], request: web.Request) -> _SleepQuery:
    try:
        return kind.model_validate(dict(request.query))
    except pydantic.ValidationError as error:
        raise validation_error(error, "query") from error


async def _to_the_end(operation: Coroutine[None, None, None]) -> None:
    """Run an operation that goes on when its client is gone."""
    await asyncio.shield(asyncio.ensure_future(operation))


def make_app(server: SimulatedServer) -> web.Application:
    """The application of one server."""
    app = web.Application(middlewares=[surface], client_max_size=MAX_BODY_BYTES)
    app[SERVER_KEY] = server
    router = app.router
    router.add_post("/v1/completions", completions)
    router.add_post("/v1/chat/completions", chat_completions)
    router.add_get("/v1/models", models)
    router.add_post("/tokenize", tokenize)
    router.add_get("/health", health)
    router.add_get("/ping", health)
    router.add_post("/ping", health)
    router.add_get("/version", version)
    router.add_get("/load", load)
    router.add_get("/metrics", metrics)
    router.add_get("/metrics/", metrics_mount)
    router.add_post("/sleep", sleep)
    router.add_post("/wake_up", wake_up)
    router.add_get("/is_sleeping", is_sleeping)
    router.add_get("/is_paused", is_paused)
    router.add_post("/pause", pause)
    router.add_post("/resume", resume)
    router.add_post("/reset_prefix_cache", reset_prefix_cache)
    router.add_post("/collective_rpc", collective_rpc)
    return app
