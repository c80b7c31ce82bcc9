"""What one call carries along: its request id and its deadline.

The server's interceptor opens a scope; a client call made inside it sends the same request id on and gets no more
time than is left. A task that outlives its handler keeps the request id and loses the deadline, so that work
started by a call does not die with it.
"""

import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass

REQUEST_ID_KEY = "x-request-id"
MAX_REQUEST_ID_LENGTH = 128


@dataclass
class CallScope:
    """The call being served. ``deadline_monotonic_s`` is on ``time.monotonic``; None for a watch without one."""

    request_id: str
    deadline_monotonic_s: float | None
    active: bool = True

    def remaining_s(self) -> float | None:
        """Seconds left, never negative; None when nothing bounds a further call."""
        if not self.active or self.deadline_monotonic_s is None:
            return None
        return max(0.0, self.deadline_monotonic_s - time.monotonic())


_current: ContextVar[CallScope | None] = ContextVar("trimtab_call", default=None)


def current_call() -> CallScope | None:
    """The call that this task serves or descends from."""
    return _current.get()


def enter_call(scope: CallScope) -> None:
    """Make ``scope`` the current call of this task; grpc gives every call a task, so nothing has to be reset."""
    _current.set(scope)


def new_request_id() -> str:
    """A fresh random id."""
    return uuid.uuid4().hex
