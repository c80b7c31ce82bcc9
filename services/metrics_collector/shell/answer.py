"""From an HTTP answer to a page, or to one line that says why there is none.

Bounded in bytes, packed and unpacked; nothing here waits.
"""

import zlib

_TEXT_TYPES = (b"text/plain", b"application/openmetrics-text")
_JSON_TYPES = (b"application/json",)


class DownError(Exception):
    """The target gave no page: it cannot be reached, is too slow, or answers with an error."""


class RefusedError(Exception):
    """The target gave something that is refused unread: too large, cut, or not a metrics page by its type."""


Failure = DownError | RefusedError


def page_body(body: bytes, *, content_type: bytes | None, encoding: bytes | None, max_bytes: int) -> bytes:
    """The page as text, unpacked. Raises ``RefusedError``."""
    if content_type is not None and not content_type.startswith(_TEXT_TYPES):
        shown = content_type.partition(b";")[0].strip().decode("latin-1")[:80]
        raise RefusedError(f"content type {shown!r} is no metrics page")
    return unpacked(body, encoding=encoding, max_bytes=max_bytes)


def unpacked(body: bytes, *, encoding: bytes | None, max_bytes: int) -> bytes:
    """``body`` without its content encoding. Raises ``RefusedError``."""
    if encoding is None or encoding == b"identity":
        return body
    if encoding.lower() != b"gzip":
        raise RefusedError(f"content encoding {encoding.decode('latin-1')[:40]!r} was not asked for")
    unpack = zlib.decompressobj(wbits=31)
    try:
        page = unpack.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise RefusedError(f"the page does not unpack: {error}") from error
    if len(page) > max_bytes:
        raise too_large(max_bytes)
    if not unpack.eof:
        raise RefusedError("the packed page is cut")
    return page


def too_large(max_bytes: int) -> RefusedError:
    """The error of a page beyond the limit."""
    return RefusedError(f"the page has more than {max_bytes} bytes")
