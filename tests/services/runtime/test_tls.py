"""TLS and mTLS by configuration, over real sockets."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from trimtab.api.collector.v1 import collector_pb2 as pb
from trimtab.config.settings import ServiceSettings
from trimtab.errors import StartupError
from trimtab.rpc import healthcheck
from trimtab.rpc.tls import ClientTls

Start = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ca, server.pem and .key, client.pem and .key, and a certificate of a foreign CA."""
    directory = tmp_path_factory.mktemp("tls")
    authority, foreign = trustme.CA(), trustme.CA()
    files = {"ca": directory / "ca.pem", "foreign_ca": directory / "foreign.pem"}
    authority.cert_pem.write_to_path(str(files["ca"]))
    foreign.cert_pem.write_to_path(str(files["foreign_ca"]))
    for name, certificate in {
        "server": authority.issue_cert("127.0.0.1", "localhost"),
        "client": authority.issue_cert("client.test"),
        "stranger": foreign.issue_cert("client.test"),
    }.items():
        files[name] = directory / f"{name}.pem"
        files[f"{name}_key"] = directory / f"{name}.key"
        certificate.cert_chain_pems[0].write_to_path(str(files[name]))
        certificate.private_key_pem.write_to_path(str(files[f"{name}_key"]))
    return files


def server_tls(pem: dict[str, Path], *, mutual: bool = False) -> dict[str, Path]:
    settings = {"tls_cert_file": pem["server"], "tls_key_file": pem["server_key"]}
    return settings | ({"tls_client_ca_file": pem["ca"]} if mutual else {})


def client_tls(pem: dict[str, Path], name: str | None = None, ca: str = "ca") -> ClientTls:
    if name is None:
        return ClientTls(ca_file=pem[ca])
    return ClientTls(ca_file=pem[ca], cert_file=pem[name], key_file=pem[f"{name}_key"])


async def code_of(demo: Any, tls: ClientTls | None) -> str:
    try:
        await demo.stub(tls).ListTargets(pb.ListTargetsRequest(), timeout=5)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def test_tls(start_demo: Start, pem: dict[str, Path]) -> None:
    demo = await start_demo(**server_tls(pem))
    assert await code_of(demo, client_tls(pem)) == "OK"
    assert await code_of(demo, None) == "UNAVAILABLE", "plain text is not served"
    assert await code_of(demo, client_tls(pem, ca="foreign_ca")) == "UNAVAILABLE", "the server is not who it says"


async def test_mutual_tls(start_demo: Start, pem: dict[str, Path]) -> None:
    demo = await start_demo(**server_tls(pem, mutual=True))
    assert await code_of(demo, client_tls(pem, "client")) == "OK"
    assert await code_of(demo, client_tls(pem)) == "UNAVAILABLE", "no certificate"
    assert await code_of(demo, client_tls(pem, "stranger")) == "UNAVAILABLE", "a foreign certificate"


async def test_a_service_calls_others_with_its_own_certificate(start_demo: Start, pem: dict[str, Path]) -> None:
    demo = await start_demo(**server_tls(pem, mutual=True))
    caller = ServiceSettings(tls_cert_file=pem["client"], tls_key_file=pem["client_key"], tls_ca_file=pem["ca"])
    assert await code_of(demo, ClientTls.from_settings(caller)) == "OK"
    assert ClientTls.from_settings(ServiceSettings()) is None


async def test_a_reachable_address_is_allowed_with_tls(start_demo: Start, pem: dict[str, Path]) -> None:
    demo = await start_demo(listen="0.0.0.0:0", **server_tls(pem))
    assert await code_of(demo, client_tls(pem)) == "OK"


async def test_bad_files_are_named(start_demo: Start, pem: dict[str, Path], tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    cases = [
        ({"tls_cert_file": tmp_path / "absent.pem", "tls_key_file": pem["server_key"]}, r"absent\.pem: No such file"),
        ({"tls_cert_file": junk, "tls_key_file": pem["server_key"]}, r"junk\.pem"),
        ({"tls_cert_file": pem["server"], "tls_key_file": pem["client_key"]}, "no matching PEM pair"),
        (server_tls(pem) | {"tls_client_ca_file": junk}, r"CA file .*junk\.pem"),
    ]
    for settings, message in cases:
        with pytest.raises(StartupError, match=message):
            await start_demo(**settings)
    with pytest.raises(StartupError, match=r"CA file .*junk\.pem"):
        ClientTls(ca_file=junk).credentials()


async def test_healthcheck_speaks_mutual_tls(start_demo: Start, pem: dict[str, Path]) -> None:
    demo = await start_demo(**server_tls(pem, mutual=True))
    environ = {
        "TRIMTAB_TLS_CA_FILE": str(pem["ca"]),
        "TRIMTAB_TLS_CERT_FILE": str(pem["client"]),
        "TRIMTAB_TLS_KEY_FILE": str(pem["client_key"]),
    }
    assert await asyncio.to_thread(healthcheck.main, [demo.address], environ) == 0
    assert await asyncio.to_thread(healthcheck.main, [demo.address], {}) == 1
