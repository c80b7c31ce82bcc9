"""Where the services are: the options that every command shares. Imports little; see `trimtab.cli.version`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab import __version__
from trimtab.addresses import split_address
from trimtab.cli.addresses import DEFAULT_PORT_BASE, MAX_PORT_BASE, LocalAddresses
from trimtab.cli_errors import CommandError

if TYPE_CHECKING:
    from trimtab.rpc.tls import ClientTls

PortBase = Annotated[
    int,
    typer.Option(
        "--port-base", envvar="TRIMTAB_PORT_BASE", min=1, max=MAX_PORT_BASE, help="First port of a local stack."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Addresses of the four services and the TLS files to reach them with."""

    policy: str
    collector: str
    prescheduler: str
    actuator: str
    port_base: int = DEFAULT_PORT_BASE
    tls: ClientTls | None = None

    @classmethod
    def local(cls, port_base: int) -> Endpoints:
        """The services of a local stack."""
        local = LocalAddresses(port_base=port_base)
        return cls(
            policy=local.address("policy"),
            collector=local.address("collector"),
            prescheduler=local.address("prescheduler"),
            actuator=local.address("actuator"),
            port_base=port_base,
        )


def _show_version(asked: bool) -> None:
    if asked:
        print(f"trimtab {__version__}")
        raise typer.Exit


def set_endpoints(
    context: typer.Context,
    port_base: PortBase = DEFAULT_PORT_BASE,
    policy: Annotated[
        str, typer.Option("--policy-address", envvar="TRIMTAB_POLICY_ADDRESS", help="host:port of the policy engine.")
    ] = "",
    collector: Annotated[
        str, typer.Option("--collector-address", envvar="TRIMTAB_COLLECTOR_ADDRESS", help="host:port of the collector.")
    ] = "",
    prescheduler: Annotated[
        str,
        typer.Option(
            "--prescheduler-address", envvar="TRIMTAB_PRESCHEDULER_ADDRESS", help="host:port of the pre-scheduler."
        ),
    ] = "",
    actuator: Annotated[
        str, typer.Option("--actuator-address", envvar="TRIMTAB_ACTUATOR_ADDRESS", help="host:port of the actuator.")
    ] = "",
    ca_file: Annotated[
        Path | None,
        typer.Option("--tls-ca-file", envvar="TRIMTAB_TLS_CA_FILE", help="PEM CA of the services; turns TLS on."),
    ] = None,
    cert_file: Annotated[
        Path | None, typer.Option("--tls-cert-file", envvar="TRIMTAB_TLS_CERT_FILE", help="PEM certificate for mTLS.")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option("--tls-key-file", envvar="TRIMTAB_TLS_KEY_FILE", help="PEM key of the certificate.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Control plane for fleets of vLLM servers."""
    local = Endpoints.local(port_base)
    given = {
        "policy": policy or local.policy,
        "collector": collector or local.collector,
        "prescheduler": prescheduler or local.prescheduler,
        "actuator": actuator or local.actuator,
    }
    for name, address in given.items():
        try:
            split_address(address)
        except ValueError as error:
            raise CommandError(f"--{name}-address: {error}") from None
    context.obj = Endpoints(**given, port_base=port_base, tls=_tls(ca_file, cert_file, key_file))


def _tls(ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> ClientTls | None:
    if ca_file is None:
        return None
    from trimtab.rpc.tls import ClientTls  # loads grpc, which some commands do without

    return ClientTls(ca_file=ca_file, cert_file=cert_file, key_file=key_file)


def endpoints_of(context: typer.Context) -> Endpoints:
    """What the top-level callback found in flags and environment. Raises TypeError without it."""
    endpoints = context.obj
    if not isinstance(endpoints, Endpoints):
        raise TypeError("the top-level callback sets the endpoints")
    return endpoints
