"""How every service process starts and stops.

    if __name__ == "__main__":
        main("metrics-collector", CollectorSettings, serve)

``serve(settings, context)`` runs until ``context.stopping`` is set and then drains. Exit status: 0 after a stop that
was requested, 1 for an error at start or later (one line on stderr), 2 for bad settings.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import structlog
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from trimtab import __version__
from trimtab.config.settings import ServiceSettings, load_settings
from trimtab.errors import SettingsError, StartupError
from trimtab.logging import configure_logging, mask_passwords
from trimtab.rpc.metrics_http import MetricsServer
from trimtab.store.errors import StoreUnavailable
from trimtab.tasks import stopped_within

__all__ = ["ServiceContext", "StartupError", "main", "run_until_stopped"]

log = structlog.get_logger(__name__)

_STOP_MARGIN_S = 5.0
S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True)
class ServiceContext:
    """What a service is given beside its settings."""

    name: str
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    ports: dict[str, int] = field(default_factory=dict)
    """Ports that the service has bound, by protocol ("grpc", "http"): what a setting of port 0 has become."""

    async def pause(self, seconds: float) -> bool:
        """Sleep, at most until the stop; True when the service is to stop."""
        return await stopped_within(self.stopping, seconds)


async def run_until_stopped(context: ServiceContext, *loops: Coroutine[Any, Any, None]) -> None:
    """Run background loops side by side until ``context.stopping``, then cancel and await those still running.

    A loop that fails ends the others, and its exception is raised as it is: a service must not go on without
    one of its parts.
    """
    tasks = [asyncio.create_task(loop) for loop in loops]
    stop = asyncio.create_task(context.stopping.wait())
    try:
        pending: set[asyncio.Task[Any]] = {stop, *tasks}
        while not stop.done() and len(pending) > 1:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        if not stop.done():
            await stop
    finally:
        for task in (stop, *tasks):
            task.cancel()
        await asyncio.gather(stop, *tasks, return_exceptions=True)


def main(name: str, settings_type: type[S], serve: Callable[[S, ServiceContext], Awaitable[None]]) -> NoReturn:
    """Parse settings, set up logs, signals and /metrics, run ``serve``, exit."""
    try:
        settings = load_settings(settings_type, sys.argv[1:], os.environ)
    except SettingsError as error:
        _say(name, error)
        sys.exit(2)
    configure_logging(name, level=settings.log_level, json=settings.log_json)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        status = runner.run(_run(name, settings, serve))
    sys.exit(status)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # not to be had on Windows
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _run(name: str, settings: S, serve: Callable[[S, ServiceContext], Awaitable[None]]) -> int:
    context = ServiceContext(name)
    _register_process_metrics(context.registry, name)
    task = asyncio.ensure_future(_serve_with_metrics(settings, context, serve))
    _on_signals(context, task)
    stop = asyncio.create_task(context.stopping.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait({task}, timeout=settings.drain_grace_s + _STOP_MARGIN_S)
        if not task.done():
            log.error("stop took too long, ending now", limit_s=settings.drain_grace_s + _STOP_MARGIN_S)
            task.cancel()
            await asyncio.wait({task}, timeout=_STOP_MARGIN_S)
            return 1
        return _status_of(name, task, context)
    finally:
        stop.cancel()


async def _serve_with_metrics(
    settings: S, context: ServiceContext, serve: Callable[[S, ServiceContext], Awaitable[None]]
) -> None:
    metrics = MetricsServer(settings.metrics_listen, context.registry)
    await metrics.start()
    try:
        await serve(settings, context)
    finally:
        await metrics.stop()


def _status_of(name: str, task: asyncio.Future[None], context: ServiceContext) -> int:
    """Exit status for how ``serve`` ended; an error is printed on stderr."""
    if task.cancelled():
        return 1
    error = _first_leaf(task.exception())
    if error is None:
        if context.stopping.is_set():
            return 0
        _say(name, "ended without being asked to")
        return 1
    if context.stopping.is_set() and isinstance(error, StoreUnavailable):
        # It was still waiting for the store, or could not release its lease.
        log.info("stopped without the store", error=str(error))
        return 0
    if isinstance(error, SettingsError):
        _say(name, error)
        return 2
    if isinstance(error, StartupError):
        _say(name, error)
    elif isinstance(error, StoreUnavailable):
        _say(name, f"the store does not answer: {error}")
    elif isinstance(error, OSError) and error.filename is not None:
        _say(name, f"{error.filename}: {error.strerror or error}")
    else:
        log.error("service failed", exc_info=error)
        _say(name, f"failed: {type(error).__name__}: {error}")
    return 1


def _first_leaf(error: BaseException | None) -> BaseException | None:
    """A task group wraps what went wrong; the first cause is what the reader can act on."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _on_signals(context: ServiceContext, task: asyncio.Future[None]) -> None:
    """SIGTERM and SIGINT request a stop; the second one stops at once."""

    def stop(received: signal.Signals) -> None:
        if context.stopping.is_set():
            log.warning("second signal, stopping at once", signal=received.name)
            task.cancel()
        else:
            log.info("stopping", signal=received.name)
            context.stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Windows' loop has no signal handlers; Ctrl-C then raises KeyboardInterrupt, which ends the process too.
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop, number)


def _register_process_metrics(registry: CollectorRegistry, name: str) -> None:
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    Info("trimtab_build", "Version of this service", registry=registry).info({"version": __version__, "service": name})


def _say(name: str, message: object) -> None:
    """One line on stderr, whatever the error's text holds."""
    text = " ".join(mask_passwords(str(message)).split())
    sys.stderr.write(f"{name}: {text}\n")
    sys.stderr.flush()
