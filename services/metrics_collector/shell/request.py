"""What is sent to targets: request lines and headers made once, the bearer token, TLS.

A request is ``head + host``: the head is shared by all targets, the rest is the target's own. The token is read again
when its file changes; it goes to the target alone, never to a log.
"""

import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import structlog

from trimtab.addresses import is_loopback, split_address
from trimtab.config.file_sd import file_stamp
from trimtab.errors import StartupError

log = structlog.get_logger(__name__)

METRICS_PATH = "/metrics"
FILTERED_PATH = "/metrics/"
LOAD_PATH = "/load"
_ACCEPT = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
_AGENT = "trimtab-metrics-collector"
_MAX_TOKEN_BYTES = 16 * 1024
_TOKEN = re.compile(rb"[\x21-\x7e]+")


class TokenFile:
    """A bearer token in a file. One that becomes unreadable keeps its last value, with a line in the log."""

    def __init__(self, path: Path) -> None:
        """Raises ``StartupError`` naming the file that cannot be used."""
        self._path = path
        self._stamp = file_stamp(path)
        try:
            self.value = self._read()
        except (OSError, ValueError) as error:
            raise StartupError(f"token file {path}: {_because(error)}") from error

    def poll(self) -> bool:
        """Look at the file; True when the token is another one now."""
        stamp = file_stamp(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            value = self._read()
        except (OSError, ValueError) as error:
            log.warning("token file refused, the last token stays", file=str(self._path), error=_because(error))
            return False
        changed = value != self.value
        self.value = value
        return changed

    def _read(self) -> bytes:
        with self._path.open("rb") as file:
            value = file.read(_MAX_TOKEN_BYTES + 1).strip()
        if len(value) > _MAX_TOKEN_BYTES or not _TOKEN.fullmatch(value):
            raise ValueError("expected one token of printable characters without spaces")
        return value


def _because(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


class RequestHeads:
    """The heads of all requests to one group of targets: everything up to the value of ``Host``.

    ``filtered`` is None where the full page is to be asked for at once.
    """

    def __init__(
        self,
        sample_names: Sequence[str],
        *,
        filter_pages: bool,
        token: TokenFile | None = None,
        full_path: str = METRICS_PATH,
    ) -> None:
        self._token = token
        self._full_path = full_path
        query = "&".join(f"name[]={quote(name)}" for name in sample_names)
        self._filtered_target = f"{FILTERED_PATH}?{query}" if filter_pages and query else None
        self.build()

    def build(self) -> None:
        """Make the heads with the token as it is now."""
        target = self._filtered_target
        self.filtered = self._head(target, _ACCEPT) if target is not None else None
        self.full = self._head(self._full_path, _ACCEPT)
        self.full_packed = self._head(self._full_path, _ACCEPT, packed=True)
        self.load = self._head(LOAD_PATH, "application/json")

    def _head(self, target: str, accept: str, *, packed: bool = False) -> bytes:
        lines = [f"GET {target} HTTP/1.1", f"User-Agent: {_AGENT}", f"Accept: {accept}"]
        # A server that may choose would choose gzip where it costs more than it spares.
        lines.append(f"Accept-Encoding: {'gzip' if packed else 'identity'}")
        head = "\r\n".join(lines).encode("ascii")
        if self._token is not None:
            head += b"\r\nAuthorization: Bearer " + self._token.value
        return head + b"\r\nHost: "


class Place:
    """Where a target listens: host, port, whether it uses TLS, and the end of its requests."""

    __slots__ = ("host", "loopback", "port", "request_end", "tls")

    def __init__(self, address: str) -> None:
        """``address`` is http://host:port or https://host:port. Raises ``ValueError`` for anything else."""
        scheme, separator, rest = address.rstrip("/").partition("://")
        if not separator or scheme not in ("http", "https") or not rest.isascii():
            raise ValueError(f"address {address[:80]!r} is not http://host:port")
        self.host, self.port = split_address(rest)
        self.tls = scheme == "https"
        self.loopback = is_loopback(self.host)
        self.request_end = rest.encode("ascii") + b"\r\n\r\n"


def tls_context(ca_file: Path | None, *, insecure_skip_verify: bool) -> ssl.SSLContext:
    """How servers under https:// are checked: by ``ca_file``, else by the system's authorities.

    Raises ``StartupError`` naming the file that is missing or wrong.
    """
    try:
        context = ssl.create_default_context(cafile=str(ca_file) if ca_file is not None else None)
    except (OSError, ValueError) as error:
        raise StartupError(f"scrape_tls_ca_file {ca_file}: {_because(error)}") from error
    if insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        log.warning("scrape_tls_insecure_skip_verify is set: anybody can pass for a target under https://")
    return context
