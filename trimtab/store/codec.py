"""Protobuf messages from stored bytes, with an error that names the key."""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from trimtab.store.errors import CorruptEntry

M = TypeVar("M", bound=Message)


def decode(message_type: type[M], data: object, *, place: str) -> M:
    """The message in ``data``. Raises ``CorruptEntry`` naming ``place``, the key and field it was read from."""
    if not isinstance(data, bytes):
        raise CorruptEntry(f"{place}: holds no bytes")
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise CorruptEntry(f"{place}: is no {message_type.DESCRIPTOR.full_name}") from error
