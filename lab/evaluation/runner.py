"""Runs tasks in worker processes: each by itself, results in the order of the tasks, whatever ends first.

There are never more tasks under way than workers. So when a worker dies without an error (killed for its memory, or a
crash in native code), few tasks can have caused it; each of them is then run again in a process of its own, and the one
that kills that one too has failed. A failure is a line of text, never the end of the others.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Outcome(NamedTuple, Generic[R]):
    """A result, or else what went wrong, in a line."""

    result: R | None
    error: str | None = None


def usable_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


OnDone = Callable[[T, Outcome[R]], None]


class Workers(Generic[T, R]):
    """Does `work` of many items: with one job here, else in processes that stay until the block ends.

    For several jobs `work`, items and results must be picklable. The processes are ended when the block is interrupted.
    """

    def __init__(self, work: Callable[[T], R], *, jobs: int) -> None:
        self._work = work
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Workers[T, R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._open.__exit__(kind, error, trace)

    def run(self, items: Sequence[T], on_done: OnDone[T, R] | None = None) -> list[Outcome[R]]:
        """The outcome of every item, in order; `on_done` is called as each ends."""
        outcomes: dict[int, Outcome[R]] = {}
        for index, outcome in self._here(items) if self._jobs == 1 else self._in_processes(items):
            outcomes[index] = outcome
            if on_done is not None:
                on_done(items[index], outcome)
        return [outcomes[index] for index in range(len(items))]

    def _here(self, items: Sequence[T]) -> Iterator[tuple[int, Outcome[R]]]:
        for index, item in enumerate(items):
            yield index, _guarded(self._work, item)

    def _in_processes(self, items: Sequence[T]) -> Iterator[tuple[int, Outcome[R]]]:
        left = deque(range(len(items)))
        while left:
            if self._pool is None:
                self._pool = self._open.enter_context(_pool(self._work, self._jobs))
            suspects: list[int] = []
            yield from _until_broken(self._pool, items, left, suspects, self._jobs)
            if suspects:
                self._open.close()
                self._pool = None
            for index in suspects:
                with _pool(self._work, 1) as alone:
                    yield index, _alone(alone, items[index])


def run_all(
    work: Callable[[T], R], items: Sequence[T], *, jobs: int, on_done: OnDone[T, R] | None = None
) -> list[Outcome[R]]:
    """`Workers` for items that are all there at once."""
    with Workers(work, jobs=max(1, min(jobs, len(items)))) as workers:
        return workers.run(items, on_done)


def _until_broken(
    pool: ProcessPoolExecutor, items: Sequence[T], left: deque[int], suspects: list[int], jobs: int
) -> Iterator[tuple[int, Outcome[R]]]:
    """Takes from `left` until it is empty, or a worker died; then what was under way is in `suspects`."""
    under_way: dict[Future[Outcome[Any]], int] = {}
    while not suspects and (left or under_way):
        while left and len(under_way) < jobs:
            index = left.popleft()
            try:
                under_way[_submit(pool, items[index])] = index
            except BrokenProcessPool:
                suspects.append(index)
                break
        done, _ = wait(under_way, return_when=FIRST_COMPLETED)
        for future in sorted(done, key=lambda one: under_way[one]):
            index = under_way.pop(future)
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                suspects.append(index)
            elif error is not None:
                yield index, Outcome(None, error_line(error))
            else:
                yield index, future.result()
    suspects += under_way.values()
    suspects.sort()


def _alone(pool: ProcessPoolExecutor, item: T) -> Outcome[R]:
    try:
        return _submit(pool, item).result()
    except BrokenProcessPool:
        return Outcome(None, "its process died without a word; a common cause is too little memory (try fewer --jobs)")
    except Exception as error:  # noqa: BLE001 - what cannot be pickled comes out here as anything
        return Outcome(None, error_line(error))


def _submit(pool: ProcessPoolExecutor, item: T) -> Future[Outcome[Any]]:
    with _interrupted_afterwards():
        return pool.submit(_in_worker, item)


@contextlib.contextmanager
def _interrupted_afterwards() -> Generator[None]:
    """Defers SIGINT and SIGTERM to the end of the block, in the main thread.

    The first item starts the workers. One that an exception cuts off between its start and its registration would be
    unknown to the pool: it would never be terminated, and the pool would wait for it without end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    deferred = {number: handler for number, handler in before.items() if callable(handler)}
    for number in deferred:
        signal.signal(number, lambda received, _frame: came.append(received))
    try:
        yield
    finally:
        for number, handler in deferred.items():
            signal.signal(number, handler)
        for received in dict.fromkeys(came):
            signal.raise_signal(received)


@contextlib.contextmanager
def _pool(work: Callable[[T], R], workers: int) -> Generator[ProcessPoolExecutor]:
    """New processes that know `work`; none of them is left behind, whatever ends the block."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(work,)
    )
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown()


_work: Callable[[Any], Any] | None = None


def _begin(work: Callable[[T], R]) -> None:
    """A worker's start. An interrupt from the terminal reaches workers too: they go without a traceback."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _work = work


def _in_worker(item: object) -> Outcome[Any]:
    if _work is None:
        raise RuntimeError("a worker was started without its work")
    return _guarded(_work, item)


def _guarded(work: Callable[[T], R], item: T) -> Outcome[R]:
    try:
        return Outcome(work(item))
    except Exception as error:  # noqa: BLE001 - one case's failure, whatever it is, must not end the others
        return Outcome(None, error_line(error))


def error_line(error: BaseException) -> str:
    """An error as one line: its message and its origin."""
    text = " ".join(str(error).split()) or "no message"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"
