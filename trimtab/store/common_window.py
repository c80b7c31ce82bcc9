"""Which partials of a role go into one sum, when several collectors share the role.

A reader may find one collector's window of this round and another's of the round before. So each collector's two newest
partials are kept, and the newest end counts that every live collector has written and at which no replica is reported
twice: two collectors report one while it is handed over. Where there is no such end, the newest one counts at which no
replica is reported twice, and the replicas of collectors that are late are missing. Where every end has one reported
twice, the newest end counts, and of two partials that report the same replica the one with more replicas: sums cannot
be taken apart, and counting twice is worse than "partial".

A collector is live while its newest window ended after the newest window of all began. The replicas of one that is not
are missing, and after ``FORGET_S`` forgotten.
"""

from collections.abc import Sequence

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.domain.time import microseconds_of

FORGET_S = 60.0
"""A collector that has been silent for so much longer than the others is gone, and its replicas with it."""


def choose(partials: Sequence[pb.RolePartial]) -> tuple[list[pb.RolePartial], list[pb.RolePartial]]:
    """(those that count, all of one window's end; the newest of each collector that is late or left out)."""
    by_collector: dict[str, dict[int, pb.RolePartial]] = {}
    for partial in sorted(partials, key=_size):
        by_collector.setdefault(partial.collector, {})[microseconds_of(partial.window_end)] = partial
    newest = {collector: own[max(own)] for collector, own in sorted(by_collector.items())}
    last = max(microseconds_of(partial.window_end) for partial in newest.values())
    begin = min(
        microseconds_of(partial.window_start)
        for partial in newest.values()
        if microseconds_of(partial.window_end) == last
    )
    live = [name for name, partial in newest.items() if microseconds_of(partial.window_end) > min(begin, last - 1)]
    ends = sorted({end for collector in live for end in by_collector[collector]}, reverse=True)
    at_end = {end: [by_collector[name][end] for name in live if end in by_collector[name]] for end in ends}
    complete = [end for end in ends if len(at_end[end]) == len(live)]
    choices = [end for end in (*complete, *ends) if not _twice(at_end[end])] or complete or ends
    chosen = _without_repeats(at_end[choices[0]])
    heard = {partial.collector for partial in chosen}
    forgotten = begin - FORGET_S * 1e6
    left_out = [
        partial
        for collector, partial in newest.items()
        if collector not in heard and microseconds_of(partial.window_end) > forgotten
    ]
    return chosen, left_out


def _size(partial: pb.RolePartial) -> tuple[int, bytes]:
    """Tells apart two partials of one collector and window, whatever order they come in."""
    return len(partial.reported_replicas), partial.SerializeToString(deterministic=True)


def _twice(partials: Sequence[pb.RolePartial]) -> bool:
    """Whether a replica is reported in two of them."""
    names = [name for partial in partials for name in set(partial.reported_replicas)]
    return len(names) != len(set(names))


def _without_repeats(partials: Sequence[pb.RolePartial]) -> list[pb.RolePartial]:
    """Partials that share no replica: the largest first, then by the collector's name."""
    found: list[pb.RolePartial] = []
    covered: set[str] = set()
    for partial in sorted(partials, key=lambda partial: (-len(partial.reported_replicas), partial.collector)):
        if covered.isdisjoint(partial.reported_replicas):
            found.append(partial)
            covered.update(partial.reported_replicas)
    return found
