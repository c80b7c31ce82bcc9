"""What tests of the controller share."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from actuator.core.model import State
from actuator.core.world import World


async def eventually(condition: Callable[[], object]) -> None:
    """Waits until it holds, for ten seconds at most."""
    give_up = asyncio.get_running_loop().time() + 30
    while not condition():
        assert asyncio.get_running_loop().time() < give_up
        await asyncio.sleep(0.005)


def counted(state: State, _world: World, _now_s: float) -> tuple[State, int]:
    """A change of the state that can be counted, and its number."""
    number = state.meta.operation_counter + 1
    return replace(state, meta=replace(state.meta, operation_counter=number)), number
