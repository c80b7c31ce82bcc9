"""``python -m trimtab.rpc.healthcheck ADDRESS [SERVICE]``: exit 0 when it is SERVING, 1 when not, 2 for bad usage.

For container health checks and scripts. TLS material comes from TRIMTAB_TLS_CA_FILE and, for mTLS,
TRIMTAB_TLS_CERT_FILE and TRIMTAB_TLS_KEY_FILE: the variables that the service itself reads.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from trimtab.addresses import split_address
from trimtab.errors import StartupError
from trimtab.rpc.errors import describe
from trimtab.rpc.tls import ClientTls

TIMEOUT_S = 3.0


def check(address: str, service: str = "", *, tls: ClientTls | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """The health state's name, such as ``SERVING``. Raises ``grpc.RpcError`` without an answer."""
    with grpc.insecure_channel(address) if tls is None else grpc.secure_channel(address, tls.credentials()) as channel:
        call = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        response = call(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Exit status; the reason is on stderr when it is not 0."""
    if not 1 <= len(argv) <= 2 or argv[0].startswith("-"):
        sys.stderr.write("usage: python -m trimtab.rpc.healthcheck ADDRESS [SERVICE]\n")
        return 2
    address, service = argv[0], argv[1] if len(argv) == 2 else ""
    try:
        split_address(address)
        state = check(address, service, tls=_tls(environ))
    except (ValueError, StartupError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except grpc.RpcError as error:
        sys.stderr.write(f"{address}: {describe(error)}\n")
        return 1
    if state != "SERVING":
        sys.stderr.write(f"{address}: {service or 'server'} is {state}\n")
        return 1
    return 0


def _tls(environ: Mapping[str, str]) -> ClientTls | None:
    paths = [environ.get(f"TRIMTAB_TLS_{part}_FILE") for part in ("CA", "CERT", "KEY")]
    ca_file, cert_file, key_file = (Path(path) if path else None for path in paths)
    return None if ca_file is None else ClientTls(ca_file=ca_file, cert_file=cert_file, key_file=key_file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
