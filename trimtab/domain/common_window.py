"""Which windows of a role go into one sum, when several collectors share the role.

A reader may find one collector's window of this round and another's of the round before. So each collector's two newest
windows are kept, and the newest end counts that every live collector has written and at which no replica is reported
twice: two collectors report one while it is handed over. Where there is no such end, the newest one counts at which no
replica is reported twice, and the replicas of collectors that are late are missing. Where every end has one reported
twice, the newest end counts, and of two windows that report the same replica the one with more replicas: a sum cannot
be split, and counting twice is worse than "partial".

A collector is live while its newest window ended after the newest window of all began. The replicas of one that is not
are missing, and after `FORGET_S` forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.domain.role_window import RoleWindow

FORGET_S = 60.0
"""A collector that has been silent for so much longer than the others is gone, and its replicas with it."""


def choose(windows: Sequence[RoleWindow]) -> tuple[Sequence[RoleWindow], Sequence[RoleWindow]]:
    """(those that count, all with one end; the newest of each collector that is late or left out)."""
    if len(windows) == 1:
        return windows, ()
    by_collector = _by_collector(windows)
    newest = {collector: own[max(own)] for collector, own in sorted(by_collector.items())}
    last = max(window.end_us for window in newest.values())
    begin = min(window.start_us for window in newest.values() if window.end_us == last)
    live = [name for name, window in newest.items() if window.end_us > min(begin, last - 1)]
    ends = sorted({end for collector in live for end in by_collector[collector]}, reverse=True)
    at_end = {end: [by_collector[name][end] for name in live if end in by_collector[name]] for end in ends}
    complete = [end for end in ends if len(at_end[end]) == len(live)]
    choices = [end for end in (*complete, *ends) if not _twice(at_end[end])] or complete or ends
    chosen = _without_repeats(at_end[choices[0]])
    heard = {window.collector for window in chosen}
    forgotten = begin - FORGET_S * 1e6
    left_out = [window for collector, window in newest.items() if collector not in heard and window.end_us > forgotten]
    return chosen, left_out


def _by_collector(windows: Sequence[RoleWindow]) -> dict[str, dict[int, RoleWindow]]:
    """Collector → end → its window; of two with the same end the larger one, whatever order they come in."""
    found: dict[str, dict[int, RoleWindow]] = {}
    for window in windows:
        own = found.setdefault(window.collector, {})
        known = own.get(window.end_us)
        own[window.end_us] = window if known is None else max(known, window, key=_size)
    return found


def _size(window: RoleWindow) -> tuple[int, str]:
    return len(window.reported_replicas), repr(window)


def _twice(windows: Sequence[RoleWindow]) -> bool:
    """Whether a replica is reported in two of them."""
    if len(windows) == 1:
        return False
    names = [name for window in windows for name in set(window.reported_replicas)]
    return len(names) != len(set(names))


def _without_repeats(windows: Sequence[RoleWindow]) -> list[RoleWindow]:
    """Windows that share no replica: the largest first, then by the collector's name."""
    found: list[RoleWindow] = []
    covered: set[str] = set()
    for window in sorted(windows, key=lambda window: (-len(window.reported_replicas), window.collector)):
        if covered.isdisjoint(window.reported_replicas):
            found.append(window)
            covered.update(window.reported_replicas)
    return found
