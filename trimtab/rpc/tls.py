"""TLS material of servers and clients, checked when it is read so that a bad file gets one clear line."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from trimtab.errors import StartupError

if TYPE_CHECKING:
    # The health check imports this module, and should not have to load pydantic.
    from trimtab.config.settings import ServiceSettings

MAX_PEM_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class ClientTls:
    """PEM files of a client: the CA that servers must come from and, for mTLS, its own certificate and key."""

    ca_file: Path
    cert_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def from_settings(cls, settings: "ServiceSettings") -> "ClientTls | None":
        """How a service calls others: TLS when ``tls_ca_file`` is set, with its own certificate if it has one."""
        if settings.tls_ca_file is None:
            return None
        return cls(ca_file=settings.tls_ca_file, cert_file=settings.tls_cert_file, key_file=settings.tls_key_file)

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ``StartupError`` naming the file that is missing or wrong."""
        _check_ca(self.ca_file)
        chain: tuple[bytes | None, bytes | None] = (None, None)
        if self.cert_file is not None and self.key_file is not None:
            _check_chain(self.cert_file, self.key_file)
            chain = (_read(self.key_file), _read(self.cert_file))
        return grpc.ssl_channel_credentials(_read(self.ca_file), chain[0], chain[1])


def server_credentials(settings: "ServiceSettings") -> grpc.ServerCredentials | None:
    """None without TLS; with ``tls_client_ca_file`` every caller must show a certificate (mTLS).

    Raises ``StartupError`` naming the file that is missing or wrong.
    """
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    _check_chain(settings.tls_cert_file, settings.tls_key_file)
    client_ca = None
    if settings.tls_client_ca_file is not None:
        _check_ca(settings.tls_client_ca_file)
        client_ca = _read(settings.tls_client_ca_file)
    return grpc.ssl_server_credentials(
        [(_read(settings.tls_key_file), _read(settings.tls_cert_file))],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_PEM_BYTES)
    except OSError as error:
        raise StartupError(f"TLS file {path}: {error.strerror or error}") from error


def _check_chain(cert_file: Path, key_file: Path) -> None:
    _read(cert_file)
    _read(key_file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise StartupError(f"TLS files {cert_file} and {key_file} are no matching PEM pair: {error}") from error


def _check_ca(path: Path) -> None:
    _read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise StartupError(f"TLS CA file {path} holds no PEM certificate: {error}") from error


def _no_password() -> str:
    raise ValueError("an encrypted key is not supported")
