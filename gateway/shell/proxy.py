"""The HTTP surface: /v1/completions, /v1/chat/completions, /v1/models, /healthz, /readyz, /metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from gateway.core.demand import DemandTally
from gateway.core.openai import BadRequest, JsonObject, Kind, encode, error_body, parse_request
from gateway.core.readiness import Standing, readiness
from gateway.core.routing import Router
from gateway.shell.dispatch import Dispatcher, NoReplica
from gateway.shell.exchange import RETRY_AFTER_S, Exchange
from gateway.shell.metrics import GatewayMetrics
from gateway.shell.upstream import Upstream


class Catalogue:
    """Names → services. While a cluster's first set is missing, an unknown name may yet become known."""

    def __init__(self, router: Router, *, clusters: int, max_waiting: int) -> None:
        self._router = router
        self._missing = clusters
        self._max_waiting = max_waiting
        self._waiting = 0
        self._news = asyncio.Event()

    def one_more(self) -> None:
        """A cluster's first set has come."""
        self._missing -= 1
        self._news.set()
        self._news = asyncio.Event()

    async def resolve(self, model: str, *, timeout_s: float) -> str | None:
        """The service that `model` names; None when no cluster knows it.

        Raises `NoReplica` when a cluster that might know it stays unknown for `timeout_s`, or too many wait for it.
        """
        service = self._router.resolve(model)
        if service is not None or self._missing <= 0:
            return service
        if self._waiting >= self._max_waiting:
            raise NoReplica("too many requests wait for the first endpoint set")
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                while service is None and self._missing > 0:
                    await self._news.wait()
                    service = self._router.resolve(model)
        except TimeoutError:
            raise NoReplica("the endpoints of a cluster are not known yet") from None
        finally:
            self._waiting -= 1
        return service


class Proxy:
    """Handlers of one gateway."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        upstream: Upstream,
        demand: DemandTally,
        metrics: GatewayMetrics,
        registry: CollectorRegistry,
        catalogue: Catalogue,
        standings: Callable[[], Sequence[Standing]],
        settle_timeout_s: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._upstream = upstream
        self._demand = demand
        self._metrics = metrics
        self._registry = registry
        self._catalogue = catalogue
        self._standings = standings
        self._settle_timeout_s = settle_timeout_s
        self._started_unix_s = int(time.time())
        self._active: set[asyncio.Task[object]] = set()
        self.stopping = False

    async def drain(self, grace_s: float) -> None:
        """Let requests under way end for up to `grace_s`, then cancel what is left."""
        self.stopping = True
        if self._active:
            await asyncio.wait(self._active, timeout=grace_s)
        for task in self._active:
            task.cancel()

    def application(self, *, max_body_bytes: int) -> web.Application:
        """The aiohttp application."""
        application = web.Application(client_max_size=max_body_bytes)
        for kind in Kind:
            application.router.add_post(kind.value, self._generate)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/healthz", self._healthz)
        application.router.add_get("/readyz", self._readyz)
        application.router.add_get("/metrics", self._metrics_page)
        return application

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        kind = Kind(request.path)
        try:
            generation = parse_request(kind, await request.read())
        except BadRequest as error:
            self._metrics.requests.labels("", "client_error").inc()
            return _error(400, str(error), "BadRequestError", error.param)
        except web.HTTPRequestEntityTooLarge as error:
            self._metrics.requests.labels("", "client_error").inc()
            return _error(413, f"the body is too large: {error.text}", "BadRequestError", None)
        try:
            service = await self._catalogue.resolve(generation.model, timeout_s=self._settle_timeout_s)
        except NoReplica as missing:
            self._metrics.requests.labels("", "no_replica").inc()
            return no_replica(str(missing))
        if service is None:
            self._metrics.requests.labels("", "client_error").inc()
            return _error(404, f"The model `{generation.model}` does not exist.", "NotFoundError", "model")
        self._demand.note(
            service, prompt_tokens=generation.prompt_tokens, output_tokens=generation.requested_output_tokens
        )
        exchange = Exchange(
            dispatcher=self._dispatcher,
            upstream=self._upstream,
            http_request=request,
            generation=generation,
            service=service,
            on_reissue=lambda cause: self._metrics.reissues.labels(service, cause).inc(),
        )
        task = asyncio.current_task()
        if task is not None:
            self._active.add(task)
            task.add_done_callback(self._active.discard)
        try:
            return await exchange.run()
        except ConnectionResetError:
            exchange.outcome = "client_gone"
            raise
        finally:
            self._metrics.requests.labels(service, exchange.outcome).inc()

    async def _models(self, _request: web.Request) -> web.Response:
        """Names that requests may use: every known service, and the models behind them."""
        router = self._dispatcher.router
        names = sorted({*router.services, *(endpoint.model for endpoint in router.endpoints)})
        cards: list[JsonObject] = [
            {"id": name, "object": "model", "created": self._started_unix_s, "owned_by": "trimtab"} for name in names
        ]
        return web.Response(body=encode({"object": "list", "data": [*cards]}), content_type="application/json")

    async def _healthz(self, _request: web.Request) -> web.Response:
        if self.stopping:
            return web.Response(status=503, text="stopping\n")
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        ready, said = readiness(self._standings(), stopping=self.stopping)
        return web.Response(status=200 if ready else 503, text=said)

    async def _metrics_page(self, request: web.Request) -> web.Response:
        encoder, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encoder(self._registry), headers={"Content-Type": content_type})


def _error(status: int, message: str, kind: str, param: str | None) -> web.Response:
    body = error_body(status, message, error_type=kind, param=param)
    return web.Response(status=status, body=body, content_type="application/json")


def no_replica(message: str) -> web.Response:
    """503 with Retry-After."""
    response = _error(503, message, "Service Unavailable", None)
    response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response
