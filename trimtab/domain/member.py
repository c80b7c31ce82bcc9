"""A role of a service, by which pools, windows and decisions are keyed."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.domain.vocabulary import Role


@dataclass(frozen=True, slots=True, order=True)
class MemberKey:
    """A role of a service in a pool; it has a Z of its own."""

    service: str
    role: Role

    def __str__(self) -> str:
        return self.service if self.role == Role.COLOCATED else f"{self.service}/{self.role.value}"
