"""The connection to Redis or Valkey: bounded in time, survives the store's restart, one kind of error.

    store = await Store.connect(settings.store_url, stopping=context.stopping)
    await store.check_schema()
    await store.redis.hset(keys.replicas(cluster), name, replica.SerializeToString())

Every command ends within ``CALL_TIMEOUT_S``: with a reply, a ``redis.exceptions.ResponseError``, or
``StoreUnavailable``. No command is repeated here: whether a broken one was carried out cannot be known, and the
callers are level-triggered, so that they come again by themselves. A pooled connection that died with the store is
noticed when it is taken from the pool, and opened anew.

Only commands of Redis 7.0, over RESP2; replies are bytes.
"""

import asyncio
import random
import re
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

import redis.asyncio
import structlog
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from trimtab.errors import StartupError
from trimtab.logging import mask_passwords
from trimtab.store import keys
from trimtab.store.errors import StoreUnavailable
from trimtab.store.upgrades import UPGRADES
from trimtab.tasks import stopped_within

log = structlog.get_logger(__name__)

T = TypeVar("T")

CALL_TIMEOUT_S = 3.0
_SOCKET_TIMEOUT_S = 2.0
_CONNECT_TIMEOUT_S = 1.0
_MAX_CONNECTIONS = 32
_PASSING = re.compile(r"\b(MISCONF|OOM|READONLY|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|LOADING)\b")
"""Refusals that are about the store's state (disk full, memory full, fail-over), not about the command."""
_MAX_SCHEMA_DIGITS = 9
# KEYS: the schema. ARGV: the version that was found, the next one. Two processes may upgrade at once.
_RAISE_SCHEMA = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0


async def _bounded(call: Awaitable[T]) -> T:
    """Await one call to the store. Raises ``StoreUnavailable`` for everything that time may mend."""
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await call
    except AuthenticationError as error:
        raise StoreUnavailable(f"it refuses the credentials: {error}") from error
    except (RedisConnectionError, OSError) as error:
        # asyncio's TimeoutError is an OSError, and "loading its data" a connection error.
        raise StoreUnavailable(str(error) or f"no answer within {CALL_TIMEOUT_S:g} s") from error
    except RedisTimeoutError as error:
        raise StoreUnavailable(f"no answer within {_SOCKET_TIMEOUT_S:g} s") from error
    except ResponseError as error:
        if isinstance(error, OutOfMemoryError) or _PASSING.search(str(error)):
            raise StoreUnavailable(f"it takes no writes: {error}") from error
        raise


class _BoundedPipeline(Pipeline):  # type: ignore[misc, unused-ignore]  # generic in the stubs of redis < 6 only
    """A pipeline whose ``execute`` is bounded like a command."""

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        return cast("list[Any]", await _bounded(super().execute(raise_on_error)))


class _BoundedRedis(redis.asyncio.Redis):
    """A client whose commands, scripts and pipelines are bounded, and fail with ``StoreUnavailable``."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await _bounded(super().execute_command(*args, **options))  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> _BoundedPipeline:
        return _BoundedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class Store:
    """One store, many concurrent users: commands of different tasks take different pooled connections."""

    def __init__(self, url: str) -> None:
        """Opens nothing yet; ``connect`` is what a service calls. Raises ``StartupError`` for a URL that is none."""
        self.shown_url = mask_passwords(url)
        try:
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=CALL_TIMEOUT_S,
                socket_timeout=_SOCKET_TIMEOUT_S,
                socket_connect_timeout=_CONNECT_TIMEOUT_S,
                socket_keepalive=True,
                retry=Retry(NoBackoff(), 0),
                # RESP3 brings maintenance notices, and with them a client that takes a closed connection for one
                # that has news.
                protocol=2,
                decode_responses=False,
                client_name="trimtab",
            )
        except (ValueError, RedisError) as error:
            raise StartupError(f"store URL {self.shown_url}: {error}") from error
        self.redis = _BoundedRedis.from_pool(pool)

    @classmethod
    async def connect(cls, url: str, *, wait_s: float | None = None, stopping: asyncio.Event | None = None) -> "Store":
        """A store that has answered a PING.

        Tries again with back-off for ``wait_s`` seconds, without end when it is None, so that services may start in any
        order. Raises ``StoreUnavailable`` when the time is over or ``stopping`` is set meanwhile.
        """
        store = cls(url)
        try:
            await store.wait_until_up(wait_s=wait_s, stopping=stopping)
        except StoreUnavailable:
            await store.close()
            raise
        return store

    async def wait_until_up(self, *, wait_s: float | None = None, stopping: asyncio.Event | None = None) -> None:
        """The waiting of ``connect``, for a service that starts to serve before its store is there.

        Raises ``StoreUnavailable``, as ``connect`` does.
        """
        loop = asyncio.get_running_loop()
        give_up = None if wait_s is None else loop.time() + wait_s
        backoff_s = _FIRST_BACKOFF_S
        told = False
        while True:
            try:
                await self.ping()
            except StoreUnavailable as error:
                if give_up is not None and loop.time() + backoff_s > give_up:
                    raise StoreUnavailable(f"{self.shown_url}: {error}") from error
                if not told:
                    log.warning("waiting for the store", store=self.shown_url, error=str(error))
                    told = True
            else:
                if told:
                    log.info("the store answers", store=self.shown_url)
                return
            if await stopped_within(stopping, backoff_s * random.uniform(0.5, 1.0)):
                raise StoreUnavailable(f"{self.shown_url}: stopped while waiting for it")
            backoff_s = min(_MAX_BACKOFF_S, backoff_s * 2)

    async def ping(self) -> None:
        """Raises ``StoreUnavailable`` unless the store answers and has loaded its data."""
        await self.redis.ping()

    async def check_schema(self, *, upgrade: bool = True) -> None:
        """Claim an empty store for this version and upgrade one of an older version.

        Without ``upgrade`` an older one is used as it is: for processes that read keys whose layout has not changed
        since, and write no others. Raises ``StartupError`` for a version that this release neither reads nor upgrades.
        """
        await self.redis.set(keys.SCHEMA, str(keys.SCHEMA_VERSION), nx=True)
        while (found := await self._schema()) != keys.SCHEMA_VERSION:
            if found not in UPGRADES:
                age = "older" if found < keys.SCHEMA_VERSION else "newer"
                raise StartupError(
                    f"{self.shown_url} has the {age} schema {found}, this version of Trimtab needs "
                    f"{keys.SCHEMA_VERSION}: use another database, or the Trimtab that wrote it"
                )
            if not upgrade:
                return
            for step in UPGRADES[found]:
                await step(self.redis)
            raised = await self.redis.register_script(_RAISE_SCHEMA)(keys=[keys.SCHEMA], args=[found, found + 1])
            if raised:
                log.info("the store was upgraded", store=self.shown_url, schema_before=found, schema=found + 1)

    async def _schema(self) -> int:
        found = await self.redis.get(keys.SCHEMA)
        text = found.decode("ascii", "replace") if isinstance(found, bytes) else ""
        if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_SCHEMA_DIGITS):
            raise StartupError(f"{self.shown_url}: key {keys.SCHEMA} holds {text[:40]!r}, which is no schema version")
        return int(text)

    async def close(self) -> None:
        """Close every connection."""
        await self.redis.aclose()
        await self.redis.connection_pool.disconnect()
