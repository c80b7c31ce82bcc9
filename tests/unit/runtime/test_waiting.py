"""Work that outlives its caller."""

import asyncio

import pytest
import structlog

from trimtab.tasks import to_its_end


async def test_work_ends_though_its_caller_is_cancelled() -> None:
    release, done = asyncio.Event(), asyncio.Event()

    async def work() -> str:
        await release.wait()
        done.set()
        return "done"

    caller = asyncio.create_task(to_its_end(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not done.is_set()
    release.set()
    await asyncio.wait_for(done.wait(), 1)
    assert await to_its_end(work()) == "done"


async def test_an_error_reaches_the_caller_or_else_the_log() -> None:
    release = asyncio.Event()

    async def work() -> None:
        await release.wait()
        raise ValueError("broken")

    caller = asyncio.create_task(to_its_end(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with structlog.testing.capture_logs() as logs:
        release.set()
        with pytest.raises(ValueError, match="broken"):
            await to_its_end(work())
        await asyncio.sleep(0)
    assert [entry["error"] for entry in logs] == ["broken"]
