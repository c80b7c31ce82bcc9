"""A real server sleeps at level 2, loads its weights again and answers as before: each call and what comes back.

On CPU a sleep frees nothing, so that this shows that the calls exist, in this order, with these answers; not that the
weights were gone. What a server with a GPU does in between is vLLM's.
"""

import json
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from actuator.shell.vllm_client import VllmClient
from tests.vllm.server import MODEL_NAME, Environment, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

CALL_S = 120.0
RELOAD = {"method": "reload_weights"}
WAKE = [
    ("/wake_up?tags=weights", None, {"status": "sleeping", "tags": ["weights"]}),
    ("/collective_rpc", RELOAD, {"results": [None]}),
    ("/wake_up?tags=kv_cache", None, {"status": "awake", "tags": ["kv_cache"]}),
    ("/reset_prefix_cache?reset_running_requests=true", None, {"success": True}),
]


@pytest.fixture(scope="module")
def server(vllm_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """One whose weights lie in a file."""
    folder = tmp_path_factory.mktemp("level-2")
    model = folder / "model"
    script = Path(__file__).parent / "make_checkpoint.py"
    subprocess.run([vllm_environment.python, str(script), str(vllm_environment.model), str(model)], check=True)
    found = VllmServer(
        Environment(vllm_environment.python, model), folder=folder, flags=["--load-format", "safetensors"]
    )
    found.start()
    yield found
    found.stop()


@pytest.fixture
async def client() -> AsyncIterator[VllmClient]:
    """Patient: the machine may be busy."""
    made = VllmClient(probe_timeout_s=30.0, canary_timeout_s=60.0)
    yield made
    await made.close()


def post(server: VllmServer, path: str, body: object = None) -> object:
    """The answer to a POST, as plain data. Raises ``URLError``, also for a status that is no success."""
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=CALL_S) as answer:
        return json.load(answer)


def said(server: VllmServer) -> str:
    """Sixteen tokens of a greedy answer."""
    body = {"model": MODEL_NAME, "prompt": "the quick brown fox", "max_tokens": 16, "temperature": 0}
    answer = post(server, "/v1/completions", body)
    assert isinstance(answer, dict)
    return str(answer["choices"][0]["text"])


def test_each_call_of_a_wake_from_level_2_answers_as_the_simulated_server_does(server: VllmServer) -> None:
    before = said(server)
    assert post(server, "/sleep?level=2&mode=wait") == {"status": "sleeping", "level": 2}
    for path, body, expected in WAKE:
        assert post(server, path, body) == expected, path
    assert said(server) == before


async def test_the_actuators_client_brings_a_server_back_from_level_2(server: VllmServer, client: VllmClient) -> None:
    before, calls = said(server), len(server.log())
    await client.sleep(server.url, level=2, timeout_s=CALL_S)
    assert await client.is_sleeping(server.url) is True
    gauges = await client.gauges(server.url)
    assert (gauges.sleep_level, gauges.memory_in_use, gauges.in_flight) == (2, False, 0)
    await client.wake_up(server.url, level=2, timeout_s=CALL_S)
    assert await client.is_sleeping(server.url) is False
    gauges = await client.gauges(server.url)
    assert (gauges.sleep_level, gauges.memory_in_use) == (None, True)
    assert await client.canary(server.url, MODEL_NAME) == MODEL_NAME
    assert said(server) == before
    # Woken once more, as after a call that was cut short.
    await client.wake_up(server.url, level=2, timeout_s=CALL_S)
    assert said(server) == before
    log = server.log()[calls:]
    places = [log.index(f'"POST {path}') for path, _, _ in WAKE]
    assert places == sorted(places), "the calls came in another order"
