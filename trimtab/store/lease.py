"""A leader's lease with fencing tokens, and writes that only the newest leader can make.

In the store at most one owner holds a lease. A process that stalls may still believe that it holds one: so every
take-over raises a token, the token goes with every write, and a receiver of writes refuses a token lower than one that
it has seen (``fenced_write`` does so for the store itself).

Limits: the token is as durable as the store. A store that lost its last writes may issue a token twice. Two measures
narrow this: an owner sends the highest token that it has seen when it acquires, and a fenced write raises a counter
that is behind its own token.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import structlog

from trimtab.store import keys
from trimtab.store.client import Store
from trimtab.store.errors import FencedOff, StoreUnavailable
from trimtab.tasks import stopped_within

log = structlog.get_logger(__name__)

DEFAULT_TTL_S = 3.0
Argument = str | bytes | int | float
MAX_COMMAND_ARGUMENTS = 4000
"""Lua unpacks a command's arguments on its stack, which is bounded."""
_MAX_FIELDS = 1000

_ACQUIRE = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner == ARGV[1] and ARGV[4] == '0' then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return redis.call('HGET', KEYS[1], 'token')
end
if owner and owner ~= ARGV[1] then return false end
local counter = tonumber(redis.call('GET', KEYS[2]) or '0')
if counter < tonumber(ARGV[3]) then redis.call('SET', KEYS[2], ARGV[3]) end
local token = redis.call('INCR', KEYS[2])
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'token', token)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return tostring(token)
"""

_RELEASE = """
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

# ARGV: token, then for each command the number of its arguments, then these. KEYS: counter, then each command's key.
_FENCED_WRITE = """
local current = tonumber(redis.call('GET', KEYS[1]) or '0')
local token = tonumber(ARGV[1])
if current > token then return {'fenced', tostring(current)} end
if current < token then redis.call('SET', KEYS[1], ARGV[1]) end
local replies = {}
local at = 2
while at <= #ARGV do
  local last = at + tonumber(ARGV[at])
  local reply = redis.call(unpack(ARGV, at + 1, last))
  replies[#replies + 1] = reply
  at = last + 1
end
return {'done', replies}
"""


def suspend_aware_monotonic() -> float:
    """Seconds on a clock that, where the system has one, runs on while the machine is suspended.

    ``time.monotonic`` stops meanwhile on Linux, and would let a machine that wakes up believe in a lease that
    ran out long ago.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class Lease(Protocol):
    """One candidate's view of one lease, wherever it is kept. `StoreLease` keeps it in Trimtab's store.

    A token is never handed out twice, and rises with every take-over. Calls raise ``StoreUnavailable`` when the place
    where the lease is kept does not answer.
    """

    @property
    def name(self) -> str:
        """What the lease is for."""
        ...

    @property
    def ttl_s(self) -> float:
        """For how long it is granted at a time."""
        ...

    @property
    def held(self) -> bool:
        """Whether the lease is ours for certain, right now."""
        ...

    @property
    def token(self) -> int | None:
        """The fencing token while the lease is held, else None."""
        ...

    @property
    def held_by_other(self) -> bool:
        """Whether another held it at the last answer."""
        ...

    def left_s(self) -> float:
        """Seconds for which the lease is still held; 0 when it is not."""
        ...

    async def acquire_or_renew(self) -> int | None:
        """Take the lease when it is free, prolong it when it is ours; the token, or None when it is not held."""
        ...

    def renew_token(self) -> None:
        """Nothing is held until the lease has another token: a write under this one may land late."""
        ...

    async def release(self) -> None:
        """Give the lease up so that another may take it at once; harmless when it is not held."""
        ...


class StoreLease:
    """A lease that is kept in the store.

    ``name`` is an owner name of ``trimtab.store.keys`` (``keys.POLICY_ENGINE``), ``owner_id`` unique per process
    start: a restarted process must not take itself for the holder of old.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        owner_id: str,
        ttl_s: float = DEFAULT_TTL_S,
        *,
        monotonic: Callable[[], float] = suspend_aware_monotonic,
    ) -> None:
        if ttl_s <= 0:
            raise ValueError(f"ttl_s is {ttl_s:g}, must be more than 0")
        self.name = name
        self.owner_id = owner_id
        self.ttl_s = ttl_s
        self._store = store
        self._monotonic = monotonic
        self._token: int | None = None
        self._expires_at = float("-inf")
        self._highest_seen = 0
        self._anew = False
        self._held_by_other = False
        self._acquire = store.redis.register_script(_ACQUIRE)
        self._release = store.redis.register_script(_RELEASE)

    @property
    def held(self) -> bool:
        """Whether the lease is certainly held right now. Its age counts from before the last renewal was sent."""
        return self._token is not None and self._monotonic() < self._expires_at

    @property
    def token(self) -> int | None:
        """The fencing token while the lease is held, else None."""
        return self._token if self.held else None

    @property
    def held_by_other(self) -> bool:
        """Whether another held it when the store last answered. One that merely ran out may still be free."""
        return self._held_by_other

    def left_s(self) -> float:
        """Seconds for which the lease is still held; 0 when it is not."""
        return max(0.0, self._expires_at - self._monotonic()) if self._token is not None else 0.0

    async def acquire_or_renew(self) -> int | None:
        """Take the lease when it is free, prolong it when it is ours; the token, or None when it is not held.

        That is so while another holds it (``held_by_other``), and when the answer came too late. Raises
        ``StoreUnavailable``; ``held`` then stays true until the time granted before is over.
        """
        asked_anew = self._anew
        asked_at, reply = await self._ask(anew=asked_anew)
        while reply is not None and self._anew and not asked_anew:
            # A write was lost meanwhile: a renewal requested before that extends the token that may not be used again.
            asked_anew = True
            asked_at, reply = await self._ask(anew=True)
        self._held_by_other = reply is None
        if reply is None:
            self._drop()
            return None
        token = int(cast("bytes", reply))
        if token != self._token:
            log.info("lease acquired", lease=self.name, owner=self.owner_id, token=token)
        self._token, self._anew = token, False
        self._highest_seen = max(self._highest_seen, token)
        self._expires_at = asked_at + self.ttl_s
        # A reply that took longer than the lease lasts grants nothing.
        return self.token

    async def _ask(self, *, anew: bool) -> tuple[float, object]:
        """The time of the request to the store, and its answer."""
        asked_at = self._monotonic()
        reply = await self._acquire(
            keys=[keys.lease(self.name), keys.lease_token(self.name)],
            args=[self.owner_id, max(1, round(self.ttl_s * 1000)), self._highest_seen, int(anew)],
        )
        return asked_at, reply

    def renew_token(self) -> None:
        """A write was not answered, and may land at any time: nothing is held until the lease has another token.

        Under that one, ``fenced_write`` refuses the late write.
        """
        self._anew = True
        self._forget()

    async def release(self) -> None:
        """Give the lease up so that another may take it at once; harmless when it is not held."""
        if self._token is not None:
            log.info("lease released", lease=self.name, owner=self.owner_id, token=self._token)
        self._forget()
        await self._release(keys=[keys.lease(self.name)], args=[self.owner_id])

    def _drop(self) -> None:
        if self._token is not None:
            log.warning("lease lost", lease=self.name, owner=self.owner_id, token=self._token)
        self._forget()

    def _forget(self) -> None:
        self._token = None
        self._expires_at = float("-inf")


async def keep_lease(
    lease: Lease, stopping: asyncio.Event, *, on_change: Callable[[int | None], None] | None = None
) -> None:
    """Keep trying and renewing, three times per ``ttl_s``, until ``stopping`` is set; then release.

    ``on_change`` is called with the token when the lease is acquired, and with None when it is lost.
    """
    told: int | None = None
    while True:
        try:
            # A store that hangs must not delay the call that reports the end of the lease.
            async with asyncio.timeout(lease.left_s() if lease.held else None):
                await lease.acquire_or_renew()
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("lease not renewed", lease=lease.name, left_s=round(lease.left_s(), 3), error=str(error))
        if lease.token != told:
            told = lease.token
            if on_change is not None:
                on_change(told)
        pause_s = lease.ttl_s / 3
        if lease.held:
            # A loss within the pause is reported when it happens.
            pause_s = min(pause_s, lease.left_s())
        if await stopped_within(stopping, pause_s):
            break
    if on_change is not None and told is not None:
        on_change(None)
    try:
        await lease.release()
    except StoreUnavailable as error:
        log.warning("lease not released, it runs out by itself", lease=lease.name, error=str(error))


async def fenced_write(
    store: Store, lease_name: str, token: int, commands: Sequence[tuple[Argument, ...]]
) -> list[Any]:
    """Run ``commands`` in one step, unless a newer token than ``token`` was handed out; their replies.

    A command is a tuple with the key second: ``("HSET", keys.desired_pools(), name, data)``. Keys must be of the
    lease's owner, so that Redis Cluster keeps them in one slot. No reader sees some of them done and others not; but
    when Redis refuses one (a wrong type, say), those before it stay done. Raises ``FencedOff``, ``StoreUnavailable``
    (the commands may have been run all the same), and ``ValueError`` for a command without a key of the lease.
    """
    owner = "{" + lease_name + "}"
    key_names = [keys.lease_token(lease_name)]
    words: list[Argument] = [token]
    for command in commands:
        if not 2 <= len(command) <= MAX_COMMAND_ARGUMENTS:
            raise ValueError(f"a command has 2 to {MAX_COMMAND_ARGUMENTS} words, this one {len(command)}")
        key = command[1]
        if not isinstance(key, str) or owner not in key:
            raise ValueError(f"key {key!r} is not of {lease_name!r}")
        key_names.append(key)
        words += [len(command), *command]
    script = store.redis.register_script(_FENCED_WRITE)
    outcome, detail = await script(keys=key_names, args=words)
    if outcome == b"fenced":
        raise FencedOff(lease_name, token=token, current_token=int(detail))
    return list(detail)


def hash_commands(key: str, written: Mapping[str, bytes], removed: Sequence[str]) -> list[tuple[Argument, ...]]:
    """Fields of a hash to set and to delete, as commands for ``fenced_write``, in portions that a script can take."""
    commands: list[tuple[Argument, ...]] = []
    names = list(written)
    for start in range(0, len(names), _MAX_FIELDS):
        words: list[Argument] = ["HSET", key]
        for name in names[start : start + _MAX_FIELDS]:
            words += [name, written[name]]
        commands.append(tuple(words))
    portions = (removed[start : start + _MAX_FIELDS] for start in range(0, len(removed), _MAX_FIELDS))
    commands.extend(("HDEL", key, *portion) for portion in portions)
    return commands
