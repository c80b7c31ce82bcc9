"""Least loaded first, however many replicas there are."""

from __future__ import annotations


class LeastLoaded:
    """Members with a load each; the least loaded is chosen, ties go to the lowest index.

    For every load there is one number whose bits are its members: choosing and changing are a few operations on
    whole numbers, which for thousands of members cost less than a heap's comparisons.
    """

    def __init__(self) -> None:
        self._loads: dict[int, int] = {}
        self._members: list[int] = [0]
        self._least = 0

    def __len__(self) -> int:
        return len(self._loads)

    def add(self, member: int, load: int = 0) -> None:
        """Let `member` be chosen from now on; raises ValueError when it is in already or the load is negative."""
        if member in self._loads:
            raise ValueError(f"member {member} is in already")
        self._put(member, load)

    def remove(self, member: int) -> None:
        """Choose `member` no more; nothing happens when it is not in."""
        load = self._loads.pop(member, None)
        if load is not None:
            self._members[load] ^= 1 << member

    def change(self, member: int, by: int) -> None:
        """Add to a member's load; nothing happens when it is not in, ValueError when it becomes negative."""
        load = self._loads.get(member)
        if load is not None:
            self._members[load] ^= 1 << member
            self._put(member, load + by)

    def least(self) -> int | None:
        """The least loaded member; None when there is none."""
        if not self._loads:
            return None
        members, least = self._members, self._least
        while not members[least]:
            least += 1
        self._least = least
        bits = members[least]
        return (bits & -bits).bit_length() - 1

    def _put(self, member: int, load: int) -> None:
        if load < 0:
            raise ValueError(f"the load of member {member} would be {load}")
        while len(self._members) <= load:
            self._members.append(0)
        self._loads[member] = load
        self._members[load] |= 1 << member
        self._least = min(self._least, load)
