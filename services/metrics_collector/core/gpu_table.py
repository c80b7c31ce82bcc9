"""The GPUs of all nodes over time: averages over a window, and each replica's share of them.

    board = GpuTable(keep_s=10)
    board.put("node-a", read_gpu_page(page), at_s=now)
    window = board.window(Window(start_s=…, end_s=…))
    window.for_replicas([GpuClaim(replica="chat-0", node="node-a", gpu_indices=(0, 1), counts=True), …])

A value is averaged over time by trapezoids between its readings inside the window, as every gauge of the collector. A
replica's ratios are means over its GPUs and its power is their sum; when one of its GPUs lacks a value the replica
lacks it too, since half of a sum would pass for a smaller sum.

Several replicas can lie on one GPU, of which the awake ones use it. A replica that does not count (asleep, not
routable) gets nothing. Where several that count share a GPU its power is divided evenly among them, so that power
adds up to what the cards draw; its ratios are what they are for each of them.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from trimtab.domain.dialects.dcgm import GpuReading

MAX_NODES = 100_000
MAX_READINGS = 512


class GpuAverages(NamedTuple):
    """One GPU, or one replica's GPUs, over a window; None where it is not known."""

    utilisation_ratio: float | None = None
    sm_activity_ratio: float | None = None
    power_w: float | None = None
    memory_ratio: float | None = None


_UNKNOWN = GpuAverages()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClaim:
    """Which GPUs a replica uses. ``counts``: it is awake and counted, so their values are its own."""

    replica: str
    node: str
    gpu_indices: tuple[int, ...]
    counts: bool


@dataclass(frozen=True, slots=True)
class GpuWindow:
    """The GPUs that were read inside a window, by node and index."""

    gpus: Mapping[tuple[str, int], GpuAverages]

    def for_replica(self, node: str, gpu_indices: Sequence[int]) -> GpuAverages:
        """The averages of a replica that has these GPUs for itself."""
        return self._over(node, gpu_indices, Counter())

    def for_replicas(self, claims: Iterable[GpuClaim]) -> dict[str, GpuAverages]:
        """The averages of every replica that counts, by name."""
        counting = [claim for claim in claims if claim.counts]
        users = Counter((claim.node, index) for claim in counting for index in claim.gpu_indices)
        return {claim.replica: self._over(claim.node, claim.gpu_indices, users) for claim in counting}

    def _over(self, node: str, gpu_indices: Sequence[int], users: Counter[tuple[str, int]]) -> GpuAverages:
        if not gpu_indices:
            return _UNKNOWN
        places = [(node, index) for index in gpu_indices]
        gpus = [self.gpus.get(place, _UNKNOWN) for place in places]
        shares = [
            None if gpu.power_w is None else gpu.power_w / max(1, users[place])
            for place, gpu in zip(places, gpus, strict=True)
        ]
        power_w = _mean(shares)
        return GpuAverages(
            utilisation_ratio=_mean([gpu.utilisation_ratio for gpu in gpus]),
            sm_activity_ratio=_mean([gpu.sm_activity_ratio for gpu in gpus]),
            power_w=None if power_w is None else power_w * len(shares),
            memory_ratio=_mean([gpu.memory_ratio for gpu in gpus]),
        )


def _mean(values: Sequence[float | None]) -> float | None:
    """None when one is not known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


class GpuTable:
    """The readings of the last ``keep_s`` seconds of every node, at most ``MAX_READINGS`` each. It holds state, and
    does no I/O."""

    def __init__(self, *, keep_s: float) -> None:
        self._keep_s = keep_s
        self._nodes: dict[str, deque[tuple[float, GpuReading]]] = {}

    @property
    def nodes(self) -> int:
        """How many nodes have readings."""
        return len(self._nodes)

    def put(self, node: str, reading: GpuReading, *, at_s: float) -> bool:
        """A page of ``node`` was read at ``at_s``. False when it was not taken: it is not newer than the last one, or
        there are ``MAX_NODES`` others. A clock that was set back by more than ``keep_s`` is followed."""
        readings = self._nodes.get(node)
        if readings is None:
            if len(self._nodes) >= MAX_NODES:
                return False
            readings = self._nodes[node] = deque(maxlen=MAX_READINGS)
        if readings and at_s <= readings[-1][0]:
            if at_s > readings[-1][0] - self._keep_s:
                return False
            readings.clear()
        readings.append((at_s, reading))
        while readings[0][0] < at_s - self._keep_s:
            readings.popleft()
        return True

    def remove(self, node: str) -> None:
        """The node's exporter is no target any more; harmless when it never was."""
        self._nodes.pop(node, None)

    def window(self, start_s: float, end_s: float) -> GpuWindow:
        """The averages over (start, end] of every GPU read inside it."""
        gpus: dict[tuple[str, int], GpuAverages] = {}
        for node, readings in self._nodes.items():
            inside = [(at_s, reading.gpus) for at_s, reading in readings if start_s < at_s <= end_s]
            weights = _weights([at_s for at_s, _ in inside])
            for index in sorted({index for _, reading in inside for index in reading}):
                series = [(at_s, reading[index]) for at_s, reading in inside if index in reading]
                times_s = [at_s for at_s, _ in series]
                columns = zip(*(values for _, values in series), strict=True)
                gpus[node, index] = GpuAverages(
                    *(
                        # No NaN among them, and none of the node's readings lacks the GPU: the usual case, in one sum.
                        min(max(column), sum(map(mul, weights, column)))
                        if len(column) == len(weights) and not math.isnan(sum(column))
                        else _time_average(times_s, column)
                        for column in columns
                    )
                )
        return GpuWindow(gpus)


def _weights(times_s: Sequence[float]) -> list[float]:
    """What each reading weighs in an average by trapezoids: half of the time to its neighbours. They sum up to 1."""
    if len(times_s) < 2:
        return [1.0] * len(times_s)
    span_s = times_s[-1] - times_s[0]
    neighbours = zip((times_s[0], *times_s[:-1]), (*times_s[1:], times_s[-1]), strict=True)
    return [(later_s - earlier_s) / 2 / span_s for earlier_s, later_s in neighbours]


def _time_average(times_s: Sequence[float], values: Sequence[float]) -> float | None:
    """Over the readings that have a number; None when none has."""
    known = [(at_s, value) for at_s, value in zip(times_s, values, strict=True) if not math.isnan(value)]
    if not known:
        return None
    weights = _weights([at_s for at_s, _ in known])
    return min(max(value for _, value in known), math.fsum(map(mul, weights, (value for _, value in known))))
