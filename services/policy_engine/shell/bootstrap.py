"""Applies the YAML resources of a directory at the start, where they are absent. What a user changed since stays."""

from __future__ import annotations

from pathlib import Path

import grpc
import structlog

from policy_engine.shell.servicer import PolicyServicer
from trimtab.config.resources import Resource, ResourceError, apply_order, parse_document
from trimtab.config.yamlfile import YamlError, read_yaml_documents
from trimtab.errors import StartupError
from trimtab.rpc.errors import RpcError
from trimtab.rpc.run import ServiceContext
from trimtab.store.errors import StoreUnavailable

log = structlog.get_logger(__name__)

RETRY_S = 0.5


def read_directory(directory: Path) -> list[Resource]:
    """The resources of the directory's YAML files in the order of `KINDS`. Raises StartupError with file and field."""
    if not directory.is_dir():
        raise StartupError(f"bootstrap_dir {directory}: no such directory")
    found: list[Resource] = []
    for path in sorted([*directory.glob("*.yaml"), *directory.glob("*.yml")]):
        try:
            for document in read_yaml_documents(path):
                if isinstance(document, dict) and document.get("kind") == "Topology":
                    continue  # for the simulated fleet
                found.append(parse_document(document))
        except (YamlError, ResourceError) as error:
            raise StartupError(f"{path}: {error}") from error
    return sorted(found, key=apply_order)


async def apply_directory(resources: list[Resource], servicer: PolicyServicer, context: ServiceContext) -> None:
    """Apply resources that are absent, as soon as some process leads; then wait for the stop.

    Raises StartupError for a resource that the engine refuses.
    """
    waiting = list(resources)
    while waiting and not context.stopping.is_set():
        try:
            await servicer.apply_if_absent(waiting[0])
            waiting.pop(0)
            continue
        except StoreUnavailable as error:
            log.debug("bootstrap waits for the store", error=str(error))
        except RpcError as error:
            if error.code != grpc.StatusCode.UNAVAILABLE:
                raise StartupError(f"bootstrap of {waiting[0].kind} {waiting[0].name}: {error.message}") from error
        if await context.pause(RETRY_S):
            return
    await context.stopping.wait()
