"""The interface to inference servers: one client calls any number of servers of one engine.

Observer, executor and composition root depend on this alone; `actuator.shell.vllm_client` is the client for vLLM.
"""

from dataclasses import dataclass
from typing import Protocol


class EngineError(Exception):
    """A call failed.

    `refused`: nothing listens at the address. `answered`: the server answered, so it is known what it did; without an
    answer it may carry the call out yet. `unsupported`: the server does not know the call, and never will.
    """

    def __init__(
        self, message: str, *, refused: bool = False, answered: bool = False, unsupported: bool = False
    ) -> None:
        super().__init__(message)
        self.refused = refused
        self.answered = answered
        self.unsupported = unsupported


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """A server's load by its own report; None for what it does not report.

    `in_flight` are running and waiting requests, `waiting` those that wait alone; `kv_usage` is the highest share of KV
    cache in use of any engine of the server. `memory_in_use`: the engine is awake as far as GPU memory goes.
    `sleep_level` is the level at which it reports that it sleeps; None when it does not report it, or is awake.
    """

    in_flight: int | None
    memory_in_use: bool | None
    waiting: int | None = None
    kv_usage: float | None = None
    sleep_level: int | None = None


class EngineClient(Protocol):
    """Calls to one server, by its address. Each is bounded in time and raises `EngineError` alone.

    Levels of sleep are vLLM's: at 1 the weights are kept in host memory, at 2 they are thrown away.
    """

    async def health(self, address: str) -> None:
        """Return when the server answers that it is up. Raises ``EngineError`` otherwise."""
        ...

    async def is_sleeping(self, address: str) -> bool | None:
        """Whether the server reports that it sleeps; None when it has no such report. A pause may count as sleep."""
        ...

    async def gauges(self, address: str) -> Gauges:
        """Load and sleep state at this moment."""
        ...

    async def sleep(self, address: str, *, level: int, timeout_s: float) -> None:
        """Asks for sleep. Only for a server with nothing in flight; believed only from `is_sleeping`."""
        ...

    async def wake_up(self, address: str, *, level: int, timeout_s: float) -> None:
        """Asks for everything to come back from sleep of `level`, or from a pause. May be called again."""
        ...

    async def canary(self, address: str, model: str) -> str:
        """The name of the model that generated one token; any model when `model` is empty. Raises ``EngineError``."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...
