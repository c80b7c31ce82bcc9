"""One real vLLM server for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.vllm.server import Environment, VllmServer, prepare


@pytest.fixture(scope="session")
def vllm_environment() -> Environment:
    """vLLM and its model; the first use installs them, which takes minutes."""
    return prepare()


@pytest.fixture(scope="session")
def vllm_server(vllm_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server that runs, awake and without requests; whoever puts it to sleep wakes it again."""
    folder = tmp_path_factory.mktemp("vllm")
    server = VllmServer(vllm_environment, folder=folder, flags=["--enable-prompt-tokens-details"])
    server.start()
    yield server
    server.stop()
