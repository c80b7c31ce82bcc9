"""A lease that is kept elsewhere than in the store, as a Kubernetes Lease would be, and the loop that keeps it."""

from __future__ import annotations

import asyncio

from trimtab.store.errors import StoreUnavailable
from trimtab.store.lease import Lease, keep_lease


class Registry:
    """Who holds the lease, and the last token."""

    def __init__(self) -> None:
        self.holder: RegistryLease | None = None
        self.token = 0
        self.away = False


class RegistryLease:
    """A candidate. Its lease lasts until somebody drops it."""

    name = "registry"
    ttl_s = 0.003

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.token: int | None = None
        self.held_by_other = False
        self.asked = asyncio.Event()

    @property
    def held(self) -> bool:
        return self.token is not None

    def left_s(self) -> float:
        return 1e6 if self.held else 0.0

    async def acquire_or_renew(self) -> int | None:
        self.asked.set()
        if self._registry.away:
            raise StoreUnavailable("the registry does not answer")
        self.held_by_other = self._registry.holder not in (None, self)
        if not self.held_by_other and self.token is None:
            self._registry.holder = self
            self._registry.token += 1
            self.token = self._registry.token
        return self.token

    def renew_token(self) -> None:
        self.token = None

    async def release(self) -> None:
        if self._registry.holder is self:
            self._registry.holder = None
        self.token = None


async def test_a_lease_of_another_kind_is_kept_handed_over_and_given_up() -> None:
    registry = Registry()
    changes: asyncio.Queue[tuple[str, int | None]] = asyncio.Queue()

    def keep(lease: Lease, label: str, stopping: asyncio.Event) -> asyncio.Task[None]:
        return asyncio.create_task(
            keep_lease(lease, stopping, on_change=lambda token: changes.put_nowait((label, token)))
        )

    first, second = RegistryLease(registry), RegistryLease(registry)
    stop_first, stop_second = asyncio.Event(), asyncio.Event()
    kept = keep(first, "first", stop_first)
    assert await changes.get() == ("first", 1)
    waiting = keep(second, "second", stop_second)
    await second.asked.wait()
    assert (second.held, second.held_by_other) == (False, True)

    first.renew_token()
    assert await changes.get() in (("first", None), ("first", 2))
    stop_first.set()
    await kept
    while True:
        label, token = await changes.get()
        if label == "second":
            break
    assert token == registry.token
    stop_second.set()
    await waiting
    assert registry.holder is None


async def test_a_lease_is_tried_for_again_after_no_answer() -> None:
    registry = Registry()
    registry.away = True
    lease, stopping, tokens = RegistryLease(registry), asyncio.Event(), asyncio.Queue()
    kept = asyncio.create_task(keep_lease(lease, stopping, on_change=tokens.put_nowait))
    await lease.asked.wait()
    registry.away = False
    assert await tokens.get() == 1
    stopping.set()
    await kept
    assert await tokens.get() is None
