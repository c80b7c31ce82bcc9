"""The one merge of what several collectors wrote about a role's window, and of a service's roles.

The collector's API, the policy engine and the virtual world call it, and see the same numbers. All sums come from
windows that end at the same moment (`trimtab.domain.common_window`).

m of "n of m" is the number of replicas the caller expects (the routable ones of the actuators), or, without that, the
number the collectors counted. Qualities are those of `trimtab.domain.grading`. Requests that wait at sleepers are
demand, not capacity: there n of m are the sleepers. NaN, infinities and negatives are refused: such a signal of such a
window counts as not reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from trimtab.domain.common_window import choose
from trimtab.domain.observation import RoleObservation, RolePart
from trimtab.domain.role_window import RoleWindow, role_number
from trimtab.domain.vocabulary import Role


def merge(windows: Sequence[RoleWindow], *, expected: Collection[str] | None = None) -> RoleObservation:
    """The observation that `windows` (at least one, all of one service and role) amount to.

    Give the two newest windows of each collector.
    Raises ValueError for no window and for windows of different roles.
    """
    if not windows:
        raise ValueError("no window to merge: a role that nobody observed has no observation")
    first = windows[0]
    if len(windows) > 1 and len({(window.service, window.role) for window in windows}) > 1:
        raise ValueError("windows of different services or roles cannot be merged")
    return RoleObservation(service=first.service, role=first.role, parts=(_part(windows, expected),))


def merge_service(
    windows: Sequence[RoleWindow], *, expected: Mapping[Role, Collection[str]] | None = None
) -> RoleObservation:
    """One service over its roles, from windows of any of them: an observation without a role.

    What roles do is added; n of m count the replicas of all roles. Finished requests, TBT, TPOT and E2E are those of
    the roles that finish requests (colocated, decode), TTFT and the queue time those of the roles that take them in
    (colocated, prefill): one request is not counted in two roles. Front doors are left out. `expected` is by role.
    Raises ValueError for no window of a role and for windows of different services.
    """
    by_role: dict[Role, list[RoleWindow]] = {}
    for window in windows:
        if window.role is not None:
            by_role.setdefault(window.role, []).append(window)
    services = sorted({window.service for own in by_role.values() for window in own})
    if not services:
        raise ValueError("no window to merge: a service that nobody observed has no observation")
    if len(services) > 1:
        raise ValueError("windows of different services cannot be merged")
    parts = [
        _part(by_role[role], None if expected is None else expected.get(role, ()))
        for role in sorted(by_role, key=role_number)
    ]
    return RoleObservation(service=services[0], role=None, parts=parts)


def _part(windows: Sequence[RoleWindow], expected: Collection[str] | None) -> RolePart:
    chosen, left_out = choose(windows)
    reported = frozenset(name for window in chosen for name in window.reported_replicas)
    if expected is None:
        named = (*chosen, *left_out)
        wanted = reported.union(*((*window.reported_replicas, *window.missing_replicas) for window in named))
    else:
        wanted = frozenset(expected)
    return RolePart.of(windows[0].role, chosen, reported=reported, wanted=wanted)
