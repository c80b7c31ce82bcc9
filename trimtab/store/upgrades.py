"""What has to be done to a store of an older schema before this release may use it.

Most of a new schema needs nothing here: records carry numbers of their own (``trimtab.store.records``) and are
rewritten when they change. A step moves or removes whole keys. It runs before the store's number is raised, possibly
in several processes at once and again after one of them was ended in the middle: so it must come to the same result
however often it runs. There is no way back; a release before the step refuses the store.

    schema 2: records of the actuator, the policy engine and the pre-scheduler have schema numbers; what stands there
    as JSON, or as a bare message, is read as it is
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import redis.asyncio

UpgradeStep = Callable[["redis.asyncio.Redis"], Awaitable[Any]]

UPGRADES: Mapping[int, tuple[UpgradeStep, ...]] = {1: ()}
"""From each schema that can be upgraded: the steps to the next one, in order."""
