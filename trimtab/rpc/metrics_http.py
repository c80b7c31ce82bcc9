"""``/metrics`` of a process, and ``/healthz`` that answers as long as its event loop turns."""

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from trimtab.addresses import describe_bind_error, split_address
from trimtab.errors import StartupError


class MetricsServer:
    """A small HTTP server on an address of its own, in the service's event loop.

    Collectors are read in the loop, not in a thread, so that they may look at the service's state.
    """

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        self._address = address
        self._registry = registry
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Raises ``StartupError`` naming the address when it cannot be had."""
        application = web.Application()
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/healthz", _healthz)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        host, port = split_address(self._address)
        try:
            await web.TCPSite(runner, host, port, reuse_address=True, reuse_port=False).start()
        except OSError as error:
            await runner.cleanup()
            raise StartupError(describe_bind_error("metrics", self._address, error)) from error
        self._runner = runner
        self.port = int(runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the port; harmless when it was never open."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        response = web.Response(body=encode(self._registry), headers={"Content-Type": content_type})
        response.enable_compression()
        return response


async def _healthz(_request: web.Request) -> web.Response:
    return web.Response(text="ok\n")
