"""What is refused before anything is done: fenced-off writers, expired and outdated writes."""

from dataclasses import dataclass, replace

from actuator.core.model import Meta

MAX_WRITERS = 64


@dataclass
class Refused(Exception):
    """A write that is not carried out. ``reason`` is stable and UPPER_SNAKE; ``detail`` is for programs."""

    reason: str
    message: str
    detail: dict[str, str]

    def __str__(self) -> str:
        return self.message


def refuse(reason: str, message: str, **detail: str) -> Refused:
    """A ``Refused`` to raise."""
    return Refused(reason, message, detail)


def check_token(meta: Meta, writer: str, token: int) -> None:
    """Raises ``Refused`` for a token that is lower than the highest one seen of the writer."""
    highest = meta.fencing.get(writer, 0)
    if token < highest:
        raise refuse(
            "FENCED_OFF",
            f"{writer} wrote with token {token}; a newer leader has shown token {highest}",
            highest_token=str(highest),
        )


def remember_token(meta: Meta, writer: str, token: int) -> Meta:
    """With the writer's highest token. Raises ``Refused`` beyond ``MAX_WRITERS``: names are never dropped."""
    if token <= meta.fencing.get(writer, 0):
        return meta
    if writer not in meta.fencing and len(meta.fencing) >= MAX_WRITERS:
        raise refuse("TOO_MANY_WRITERS", f"{MAX_WRITERS} writers are known already, {writer} is not one of them")
    return replace(meta, fencing={**meta.fencing, writer: token})


def check_expiry(expire_s: float | None, now_s: float) -> None:
    """Raises ``Refused`` for a write whose time is over; None never expires."""
    if expire_s is not None and expire_s <= now_s:
        raise refuse("EXPIRED", f"the write expired {now_s - expire_s:.1f} s ago: decide again on fresh observations")
