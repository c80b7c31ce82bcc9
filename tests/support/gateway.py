"""Stand-ins around a real gateway: vLLM-like servers, an actuator and a collector, all on real sockets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import grpc
import pytest
from aiohttp import web

from gateway.shell.serve import serve
from gateway.shell.settings import GatewaySettings
from simulator.core.tokens import TextCursor, count_tokens, text_of
from tests.support.serving import ANY_PORT, bound_port
from trimtab.api.actuator.v1 import actuator_pb2, actuator_pb2_grpc
from trimtab.api.collector.v1 import collector_pb2, collector_pb2_grpc
from trimtab.api.common.v1 import types_pb2
from trimtab.rpc.run import ServiceContext

ROUTABLE = actuator_pb2.ENDPOINT_STATE_ROUTABLE
DRAINING = actuator_pb2.ENDPOINT_STATE_DRAINING
EVICTING = actuator_pb2.ENDPOINT_STATE_EVICTING


async def until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # any condition, not one event
            await asyncio.sleep(0.005)


class FakeServer:
    """One vLLM server that says the simulator's deterministic text, and fails as it is told.

    `gate_after`: send this many tokens, then wait for `gate`. `break_after`/`break_how`: after this many tokens end
    with "abort", "reset", "eof" or "error"; "http_500" fails at once, "hang" never answers.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.gate = asyncio.Event()
        self.gate_after: int | None = None
        self.break_after: int | None = None
        self.break_how = ""
        self.gone = 0
        self.kv_params: dict | None = {"remote_engine_id": name, "do_remote_prefill": True}
        self.tokenize = True
        self.tokens_per_event = 1
        self.active = 0
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        application = web.Application(client_max_size=2**24)
        application.router.add_post("/v1/completions", self._answer)
        application.router.add_post("/v1/chat/completions", self._answer)
        application.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port or 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenize:
            raise web.HTTPNotFound
        return web.json_response({"count": count_tokens((await request.json())["prompt"])})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.active += 1
        try:
            return await self._answer_body(request, body)
        except asyncio.CancelledError:
            self.gone += 1
            raise
        finally:
            self.active -= 1

    async def _answer_body(self, request: web.Request, body: dict) -> web.StreamResponse:
        if self.break_how == "http_500":
            return web.json_response({"error": {"message": "boom", "code": 500}}, status=500)
        if self.break_how == "http_400":
            return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)
        if self.break_how == "hang":
            await self.gate.wait()
        chat = "messages" in body
        prompt = body.get("prompt")
        if chat:
            last = body["messages"][-1]
            text = "".join(f"{m['role']}: {m['content']}\n" for m in body["messages"][:-1])
            if body.get("continue_final_message"):
                prompt = f"{text}{last['role']}:{last['content']}"
            else:
                prompt = f"{text}{last['role']}: {last['content']}\nassistant:"
        ids = TextCursor.after(prompt).take(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        if body.get("stream"):
            return await self._stream(request, body, count_tokens(prompt), ids, chat=chat)
        return await self._whole(request, body, count_tokens(prompt), ids, chat=chat)

    async def _whole(
        self, request: web.Request, body: dict, prompt_tokens: int, ids: list[int], *, chat: bool
    ) -> web.StreamResponse:
        reason = "length"
        if self.break_how in ("reset", "eof"):
            assert request.transport is not None
            request.transport.abort()
        if self.break_how == "abort":
            reason, ids = "abort", ids[: self.break_after]
        if self.gate_after is not None:
            await self.gate.wait()
        choice = {"index": 0, "finish_reason": reason}
        if chat:
            choice["message"] = {"role": "assistant", "content": text_of(ids)}
        else:
            choice["text"] = text_of(ids)
        answer = {
            "id": f"id-{self.name}",
            "model": body["model"],
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(ids),
                "total_tokens": prompt_tokens + len(ids),
            },
        }
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode") and self.kv_params is not None:
            answer["kv_transfer_params"] = self.kv_params
        return web.json_response(answer)

    async def _stream(
        self, request: web.Request, body: dict, prompt_tokens: int, ids: list[int], *, chat: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)

        async def say(choices: list, **more: object) -> None:
            event = {"id": f"id-{self.name}", "created": 1, "model": body["model"], "choices": choices, **more}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        def choice(some: list[int], reason: str | None) -> dict:
            if chat:
                return {"index": 0, "delta": {"content": text_of(some)}, "finish_reason": reason}
            shown = some if body.get("return_token_ids") else None
            return {"index": 0, "text": text_of(some), "finish_reason": reason, "token_ids": shown}

        if chat:
            await say([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        for start in range(0, len(ids), self.tokens_per_event):
            if self.gate_after is not None and start >= self.gate_after:
                await self.gate.wait()
            if self.break_after is not None and start >= self.break_after:
                return await self._break(request, response, say, choice)
            some = ids[start : start + self.tokens_per_event]
            last = start + self.tokens_per_event >= len(ids)
            await say([choice(some, "length" if last else None)])
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids)}
            await say([], usage={**usage, "total_tokens": prompt_tokens + len(ids)})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _break(self, request: web.Request, response: web.StreamResponse, say, choice) -> web.StreamResponse:
        if self.break_how == "abort":
            await say([choice([], "abort")])
            await response.write(b"data: [DONE]\n\n")
        elif self.break_how == "error":
            await response.write(b'data: {"error": {"message": "engine died", "code": 500}}\n\ndata: [DONE]\n\n')
        elif self.break_how == "reset":
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        await response.write_eof()
        return response


class FakeActuator(actuator_pb2_grpc.ActuatorServiceServicer):
    """Sends endpoint sets and keeps the acknowledgements."""

    def __init__(self, cluster: str = "local") -> None:
        self.cluster = cluster
        self.current: actuator_pb2.WatchEndpointsResponse | None = None
        self.acknowledged: list[actuator_pb2.AcknowledgeEndpointsRequest] = []
        self.watches = 0
        self.lease_s = 3.0
        self.heartbeat_s = 1.0
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        actuator_pb2_grpc.add_ActuatorServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def publish(self, revision: int, services: dict[str, list[tuple]]) -> None:
        """`services`: service → [(replica, address, state, role?, model?)]."""
        self.current = actuator_pb2.WatchEndpointsResponse(
            cluster=self.cluster, revision=revision, lease_s=self.lease_s
        )
        for service, endpoints in services.items():
            found = self.current.services.add(service=service)
            for replica, address, state, *rest in endpoints:
                found.endpoints.add(
                    replica=replica,
                    address=address,
                    state=state,
                    role=rest[0] if rest else types_pb2.ROLE_COLOCATED,
                    model=rest[1] if len(rest) > 1 else service,
                )
        self._changed.set()
        self._changed = asyncio.Event()

    async def WatchEndpoints(self, request, context):
        self.watches += 1
        while True:
            changed = self._changed
            if self.current is not None:
                yield self.current
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), self.heartbeat_s)

    async def AcknowledgeEndpoints(self, request, context):
        self.acknowledged.append(request)
        revision = self.current.revision if self.current is not None else 0
        return actuator_pb2.AcknowledgeEndpointsResponse(current_revision=revision)

    async def wait_acknowledged(self, revision: int, *, drained: str | None = None) -> None:
        def seen() -> bool:
            if not self.acknowledged or self.acknowledged[-1].revision < revision:
                return False
            return drained is None or all(item.replica != drained for item in self.acknowledged[-1].in_flight)

        await until(seen, timeout_s=20.0)


class FakeCollector(collector_pb2_grpc.CollectorServiceServicer):
    """Keeps the demand reports."""

    def __init__(self) -> None:
        self.reports: list[collector_pb2.ReportDemandRequest] = []
        self.port = 0
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        collector_pb2_grpc.add_CollectorServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def ReportDemand(self, request, context):
        self.reports.append(request)
        return collector_pb2.ReportDemandResponse()

    def total(self, service: str, field: str) -> int:
        return sum(getattr(d, field) for report in self.reports for d in report.demands if d.service == service)


class GatewayUnderTest:
    """A running gateway with its surroundings and a client session."""

    def __init__(self) -> None:
        self.actuator = FakeActuator()
        self.collector = FakeCollector()
        self.servers: dict[str, FakeServer] = {}
        self.streams: list[StreamedAnswer] = []
        self.context = ServiceContext("gateway")
        self.settings: GatewaySettings | None = None
        self.http: aiohttp.ClientSession = aiohttp.ClientSession()
        self._task: asyncio.Task | None = None

    @property
    def address(self) -> str:
        """Where it listens, once it is started."""
        return f"127.0.0.1:{self.context.ports['http']}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def server(self, name: str) -> FakeServer:
        self.servers[name] = FakeServer(name)
        await self.servers[name].start()
        return self.servers[name]

    async def start(self, **settings: object) -> None:
        await self.actuator.start()
        await self.collector.start()
        defaults: dict = {
            "listen": ANY_PORT,
            "actuators": {"local": f"127.0.0.1:{self.actuator.port}"},
            "collector": f"127.0.0.1:{self.collector.port}",
            "max_hold_s": 5.0,
            "acknowledge_s": 0.05,
            "demand_s": 0.05,
            "drain_grace_s": 0.2,
            "avoid_s": 0.3,
        }
        self.settings = GatewaySettings.model_validate({**defaults, **settings})
        self._task = asyncio.create_task(serve(self.settings, self.context))
        await bound_port(self.context, self._task, "http")
        async with self.http.get(self.url + "/healthz") as response:
            assert response.status == 200

    async def publish(self, revision: int, services: dict[str, list[tuple]]) -> None:
        self.actuator.publish(revision, services)
        await self.actuator.wait_acknowledged(revision)

    async def stop(self) -> None:
        self.context.stopping.set()
        if self._task is not None:
            await self._task
        await self.http.close()
        for server in self.servers.values():
            server.gate.set()
            await server.stop()
        await self.actuator.stop()
        await self.collector.stop()

    async def complete(self, **body: object) -> tuple[int, dict]:
        async with self.http.post(self.url + "/v1/completions", json=body) as response:
            return response.status, await response.json()

    async def until_streamed(self, text: str) -> None:
        """Wait until the newest stream has brought its client this text."""
        await until(lambda: bool(self.streams) and self.streams[-1].text == text)

    async def is_listening(self) -> bool:
        """Whether a new connection is accepted."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.context.ports["http"])
        except OSError:
            return False
        writer.close()
        return True

    async def stream(self, path: str = "/v1/completions", **body: object) -> "StreamedAnswer":
        """The whole streamed answer; `streams` has what has come of it meanwhile."""
        answer = StreamedAnswer()
        self.streams.append(answer)
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            answer.status = response.status
            await answer.read(response)
        return answer


class StreamedAnswer:
    """What a client makes of a stream."""

    def __init__(self) -> None:
        self.status = 0
        self.text = ""
        self.ids: set[str] = set()
        self.finish_reasons: list[str] = []
        self.usage: dict | None = None
        self.errors: list[dict] = []
        self.done = 0
        self.roles = 0

    async def read(self, response: aiohttp.ClientResponse) -> None:
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.done += 1
                continue
            self._event(json.loads(payload))

    def _event(self, event: dict) -> None:
        if "error" in event:
            self.errors.append(event["error"])
            return
        self.ids.add(event["id"])
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            delta = choice.get("delta", {})
            self.text += choice.get("text", "") or delta.get("content", "") or ""
            self.roles += "role" in delta
            if choice.get("finish_reason"):
                self.finish_reasons.append(choice["finish_reason"])


@pytest.fixture
async def gateway() -> AsyncIterator[GatewayUnderTest]:
    """Not started: call `start`."""
    under_test = GatewayUnderTest()
    try:
        yield under_test
    finally:
        await under_test.stop()


@pytest.fixture
def wait_until() -> Callable[..., Awaitable[None]]:
    return until


@pytest.fixture
def states() -> dict[str, int]:
    return {"routable": ROUTABLE, "draining": DRAINING, "evicting": EVICTING}
