"""Structured logs on stderr, one event a line: JSON for machines, columns for people at a terminal.

The logs of libraries (grpc, aiohttp, redis) take the same way. Passwords inside URLs are masked, whatever key
they are logged under. Bind context with ``structlog.contextvars``: a gRPC call's request id is bound there.
"""

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):([^/\s@]+)@")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def mask_passwords(text: str) -> str:
    """``redis://user:secret@host`` → ``redis://user:***@host``."""
    return _URL_PASSWORD.sub(r"\1:***@", text)


def _mask_event(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if isinstance(value, str) and "://" in value:
            event[key] = mask_passwords(value)
    return event


def configure_logging(service: str, *, level: str = "info", json: bool | None = None) -> None:
    """Send every log of this process to stderr, marked with ``service``.

    ``level`` is debug, info, warning or error. ``json=None`` means JSON when stderr is no terminal. Raises ValueError
    for an unknown level.
    """
    if level not in _LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(_LEVELS)}")
    as_json = not sys.stderr.isatty() if json is None else json

    def add_service(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("service", service)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        add_service,
    ]
    last: list[structlog.typing.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if as_json:
        last += [structlog.processors.format_exc_info, _mask_event, structlog.processors.JSONRenderer()]
    else:
        last += [_mask_event, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]

    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=last, foreign_pre_chain=shared))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(_LEVELS[level])
    for chatty in ("asyncio", "aiohttp.access", "grpc", "urllib3"):
        logging.getLogger(chatty).setLevel(max(_LEVELS[level], logging.WARNING))
