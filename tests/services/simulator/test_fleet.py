"""The fleet's admin API and its servers on real sockets."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from simulator.core.profile import Profile
from simulator.fleet.admin import make_admin_app
from simulator.fleet.fleet import Fleet, FleetSettings, write_whole
from simulator.fleet.model import FleetConfigError, Inventory, Node, load_inventory
from simulator.fleet.replica import Replica
from simulator.scenarios import Scenario, load_scenario, scenario_folder

POOL = {"trimtab.dev/pool": "shared"}


@dataclasses.dataclass
class FleetAt:
    """A fleet and where its admin API listens."""

    url: str
    fleet: Fleet
    http: aiohttp.ClientSession

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, dict]:
        async with self.http.request(method, self.url + path, json=body) as response:
            return response.status, await response.json()

    async def create(self, name: str, *, gpus: list[int], pool: bool = False, **more: object) -> tuple[int, dict]:
        spec = {"replica": name, "service": "chat", "role": "colocated", "model": "tiny", "node": "node-0"}
        spec |= {"gpu_indices": gpus, "profile": "quick", "labels": POOL if pool else {}, **more}
        return await self.call("POST", "/replicas", spec)

    async def running(self, name: str) -> dict:
        """Wait until the replica runs."""
        async with asyncio.timeout(30):
            while True:
                _, body = await self.call("GET", f"/replicas/{name}")
                if body["state"] == "running":
                    return body
                await asyncio.sleep(0.005)

    async def put(self, address: str, path: str) -> int:
        async with self.http.post(address + path) as response:
            return response.status


MakeFleet = Callable[..., Awaitable[FleetAt]]


@pytest.fixture
async def make_fleet(http, free_ports, quick_profile: Profile) -> AsyncIterator[MakeFleet]:
    cleanups: list[tuple[Fleet, web.AppRunner]] = []

    async def make(scenario: Scenario | None = None, **settings: object) -> FleetAt:
        nodes = [Node(node="node-0", gpu_type="A100-40GB", gpus=4), Node(node="node-1", gpu_type="H100-80GB", gpus=2)]
        settings.setdefault("server_port_base", free_ports(16)[0])
        fleet = Fleet(Inventory(nodes=nodes), {"quick": quick_profile}, FleetSettings(**settings))  # type: ignore[arg-type]
        runner = web.AppRunner(make_admin_app(fleet, scenario), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        cleanups.append((fleet, runner))
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        fleet.restore()
        return FleetAt(f"http://127.0.0.1:{runner.addresses[0][1]}", fleet, http)

    yield make
    for fleet, runner in cleanups:
        await fleet.stop()
        await runner.cleanup()


async def test_the_scenario_is_shown_with_its_resources(make_fleet) -> None:
    at = await make_fleet(load_scenario("demo"))
    status, body = await at.call("GET", "/scenario")
    assert (status, body["scenario"]) == (200, "demo")
    folder = scenario_folder("demo") / "resources"
    assert body["resources"] == {file.name: file.read_text() for file in folder.iterdir()}


async def test_a_fleet_without_a_scenario_shows_none(make_fleet) -> None:
    at = await make_fleet()
    status, body = await at.call("GET", "/scenario")
    assert status == 404
    assert "no scenario" in body["error"]


async def test_a_replica_starts_refuses_connections_meanwhile_and_serves(make_fleet, http, monkeypatch) -> None:
    start_up, loaded = Replica._start_up, asyncio.Event()

    async def until_loaded(replica: Replica) -> None:
        await start_up(replica)
        await loaded.wait()

    monkeypatch.setattr(Replica, "_start_up", until_loaded)
    at = await make_fleet()
    status, body = await at.create("chat-0", gpus=[1])
    assert status == 201
    assert body["state"] == "starting"
    with pytest.raises(aiohttp.ClientConnectionError):
        await http.get(body["address"] + "/health")
    loaded.set()
    body = await at.running("chat-0")
    assert body["hbm_used_gib"] == pytest.approx(34.0, abs=0.1)
    async with http.post(body["address"] + "/v1/completions", json={"prompt": "hi", "max_tokens": 3}) as response:
        assert (await response.json())["usage"]["completion_tokens"] == 3
    _, stats = await at.call("GET", "/replicas/chat-0/stats")
    assert stats == {
        "requests_received": 1,
        "requests_finished": 1,
        "requests_failed": 0,
        "requests_received_while_asleep": 0,
        "requests_received_without_weights": 0,
        "prompt_tokens": 1,
        "generation_tokens": 3,
        "aborted": 0,
        "aborted_by_sleep": 0,
    }
    _, nodes = await at.call("GET", "/nodes")
    assert [n["free_gpu_indices"] for n in nodes["nodes"]] == [[0, 2, 3], [0, 1]]


async def test_creating_again_is_idempotent_and_another_spec_is_a_conflict(make_fleet) -> None:
    at = await make_fleet()
    assert (await at.create("chat-0", gpus=[0]))[0] == 201
    assert (await at.create("chat-0", gpus=[0]))[0] == 200
    status, body = await at.create("chat-0", gpus=[1])
    assert (status, body) == (409, {"error": "replica 'chat-0' exists with another spec"})
    status, body = await at.create("chat-1", gpus=[0])
    assert (status, body) == (409, {"error": "GPU 0 of node-0 belongs to replica 'chat-0'"})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"node": "node-7"}, "node: 'node-7' is not known; there are node-0, node-1"),
        ({"gpu_indices": [4]}, "gpu_indices: node-0 has 4 GPUs, no GPU 4"),
        ({"gpu_indices": [0, 1]}, "gpu_indices: profile quick needs 1 GPUs, not 2"),
        ({"gpu_indices": [0, 0]}, "gpu_indices: Value error, a GPU is named twice"),
        ({"profile": "fast"}, "profile: 'fast' is not known; there are quick"),
        ({"profile": "", "model": "other"}, "none is packaged for model 'other' on A100-40GB"),
        ({"node": "node-1"}, "profile: quick is for A100, node-1 has H100-80GB"),
        ({"role": "both"}, "role: Input should be"),
        ({"color": "red"}, "color: Extra inputs are not permitted"),
        ({"replica": "Chat_0"}, "replica: String should match pattern"),
    ],
)
async def test_a_spec_that_fits_nothing_is_refused_with_the_field(make_fleet, change: dict, text: str) -> None:
    at = await make_fleet()
    status, body = await at.create("chat-0", **{"gpus": [0], **change})
    assert status == 400
    assert text in body["error"]
    assert at.fleet.replicas == {}


async def test_the_profile_is_found_by_model_and_gpu_type_when_none_is_named(make_fleet) -> None:
    at = await make_fleet()
    status, body = await at.create("chat-0", gpus=[0], profile="")
    assert (status, body["profile"]) == (201, "quick")


async def test_pool_members_take_turns_on_a_gpu_and_the_second_wake_is_out_of_memory(make_fleet, http) -> None:
    at = await make_fleet()
    await at.create("chat-0", gpus=[0], pool=True)
    status, _ = await at.create("code-0", gpus=[0], pool=True, service="code")
    assert status == 201
    chat = await at.running("chat-0")
    _, code = await at.call("GET", "/replicas/code-0")
    assert code["state"] == "starting"
    assert "CUDA out of memory" in code["message"]
    assert await at.put(chat["address"], "/sleep?level=1") == 200
    code = await at.running("code-0")
    _, body = await at.call("GET", "/replicas/chat-0")
    assert body["hbm_used_gib"] == 1.4
    assert body["host_memory_gib"] == pytest.approx(14.96)
    assert body["wake_called_at"] is None
    _, gpus = await at.call("GET", "/gpus")
    assert gpus["gpus"][0]["awake_replicas"] == ["code-0"]
    assert gpus["gpus"][0]["used_gib"] == pytest.approx(35.4)
    async with http.post(chat["address"] + "/wake_up") as response:
        assert response.status == 500
        assert "CUDA out of memory" in (await response.json())["error"]["message"]
    assert await at.put(code["address"], "/sleep?level=1") == 200
    assert await at.put(chat["address"], "/wake_up") == 200
    _, gpus = await at.call("GET", "/gpus")
    assert gpus["gpus"][0]["awake_replicas"] == ["chat-0"]
    _, body = await at.call("GET", "/replicas/chat-0")
    assert time.time() - 10 < body["wake_called_at"] <= time.time()


async def test_deleting_ends_work_with_abort_frees_the_gpu_and_keeps_the_counters(make_fleet, http, until) -> None:
    at = await make_fleet()
    await at.create("chat-0", gpus=[0])
    address = (await at.running("chat-0"))["address"]
    pending = asyncio.create_task(http.post(address + "/v1/completions", json={"prompt": "a", "max_tokens": 4000}))
    await until(lambda: at.fleet.replicas["chat-0"].server.engine.num_running == 1)
    assert (await at.call("DELETE", "/replicas/chat-0"))[0] == 200
    async with await pending as response:
        assert (await response.json())["choices"][0]["finish_reason"] == "abort"
    assert (await at.call("DELETE", "/replicas/chat-0"))[0] == 404
    _, nodes = await at.call("GET", "/nodes")
    assert nodes["nodes"][0]["free_gpu_indices"] == [0, 1, 2, 3]
    _, gpus = await at.call("GET", "/gpus")
    assert gpus["gpus"][0]["used_gib"] == 0
    _, stats = await at.call("GET", "/stats")
    assert stats["services"]["chat"]["aborted"] == 1
    assert stats["gpu_seconds_awake"]["chat"] > 0
    status, body = await at.create("chat-1", gpus=[0])
    assert status == 201
    assert body["address"] == address


async def test_a_name_is_free_again_only_when_its_server_has_ended(make_fleet, monkeypatch) -> None:
    at = await make_fleet()
    await at.create("chat-0", gpus=[0])
    await at.running("chat-0")
    stopping, go = asyncio.Event(), asyncio.Event()
    stop = type(at.fleet.replicas["chat-0"]).stop

    async def slow_stop(replica) -> None:
        stopping.set()
        await go.wait()
        await stop(replica)

    monkeypatch.setattr("simulator.fleet.replica.Replica.stop", slow_stop)
    deletions = [asyncio.create_task(at.call("DELETE", "/replicas/chat-0")) for _ in range(2)]
    await stopping.wait()
    status, body = await at.create("chat-0", gpus=[0])
    assert (status, body) == (409, {"error": "replica 'chat-0' is being deleted"})
    assert (await at.call("GET", "/stats"))[0] == 200
    go.set()
    assert [status for status, _ in await asyncio.gather(*deletions)] == [200, 200]
    assert (await at.create("chat-0", gpus=[0]))[0] == 201
    assert (await at.running("chat-0"))["hbm_used_gib"] > 30


async def test_a_crash_breaks_connections_and_the_restarted_server_counts_from_zero(
    make_fleet, http, until, monkeypatch
) -> None:
    monkeypatch.setattr("simulator.fleet.replica._RESTART_DELAY_S", 1.5)
    at = await make_fleet()
    await at.create("chat-0", gpus=[0])
    body = await at.running("chat-0")
    url = body["address"] + "/v1/completions"
    async with http.post(url, json={"prompt": "a", "max_tokens": 2}) as response:
        assert response.status == 200
    pending = asyncio.create_task(http.post(url, json={"prompt": "a", "max_tokens": 4000}))
    await until(lambda: at.fleet.replicas["chat-0"].server.engine.num_running == 1)
    revision = at.fleet.revision
    assert (await at.call("POST", "/replicas/chat-0/fault", {"fault": "crash"}))[0] == 200
    with pytest.raises(aiohttp.ClientConnectionError):
        await pending
    await until(lambda: at.fleet.replicas["chat-0"].state == "exited")
    await until(lambda: at.fleet.memory.held_gib("chat-0") == 0)
    await until(lambda: at.fleet.replicas["chat-0"].restarts == 1)
    again = await at.running("chat-0")
    assert again["start_time"] > body["start_time"]
    assert again["address"] == body["address"]
    assert again["revision"] > revision
    _, stats = await at.call("GET", "/replicas/chat-0/stats")
    assert stats["requests_received"] == 0
    _, total = await at.call("GET", "/stats")
    assert total["services"]["chat"]["requests_received"] == 2


async def test_a_fault_heals_after_its_seconds(make_fleet, http) -> None:
    at = await make_fleet()
    await at.create("chat-0", gpus=[0])
    address = (await at.running("chat-0"))["address"]
    assert (await at.call("POST", "/replicas/chat-0/fault", {"fault": "http_500", "seconds": 1.0}))[0] == 200
    async with http.get(address + "/health") as response:
        assert response.status == 500
    async with asyncio.timeout(30):
        while True:
            async with http.get(address + "/health") as response:
                if response.status == 200:
                    break
            await asyncio.sleep(0.01)
    status, body = await at.call("POST", "/replicas/chat-0/fault", {"fault": "flood"})
    assert status == 400
    assert "'slow'" in body["error"]


async def test_kv_goes_from_a_prefill_to_a_decode_replica(make_fleet, http, until) -> None:
    at = await make_fleet()
    await at.create("p-0", gpus=[0], role="prefill")
    await at.create("d-0", gpus=[1], role="decode")
    prefill, decode = (await at.running("p-0"))["address"], (await at.running("d-0"))["address"]
    body = {"prompt": "abcd" * 50, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    async with http.post(prefill + "/v1/completions", json=body) as response:
        params = (await response.json())["kv_transfer_params"]
    body = {"prompt": "abcd" * 50, "max_tokens": 4, "kv_transfer_params": params}
    async with http.post(decode + "/v1/completions", json=body) as response:
        assert (await response.json())["usage"]["completion_tokens"] == 4
    assert 'source="external_kv_transfer"} 49.0' in at.fleet.replicas["d-0"].server.page.render()
    await until(lambda: at.fleet.replicas["p-0"].server.engine.pool.used_blocks == 0)


async def test_a_restarted_fleet_runs_the_same_replicas_on_the_same_ports(make_fleet, tmp_path: Path) -> None:
    state_file = tmp_path / "fleet.json"
    first = await make_fleet(state_file=state_file)
    await first.create("chat-0", gpus=[0], pool=True)
    await first.create("chat-1", gpus=[1], pool=True)
    await first.call("DELETE", "/replicas/chat-0")
    before = await first.running("chat-1")
    await first.fleet.stop()
    second = await make_fleet(state_file=state_file, server_port_base=first.fleet.settings.server_port_base)
    after = await second.running("chat-1")
    _, listed = await second.call("GET", "/replicas")
    assert [r["replica"] for r in listed["replicas"]] == ["chat-1"]
    assert after["address"] == before["address"]
    assert after["labels"] == POOL


async def test_a_damaged_state_file_is_named(make_fleet, tmp_path: Path) -> None:
    state_file = tmp_path / "fleet.json"
    state_file.write_text('{"version": 1, "replicas": [{"port": 1}]}')
    with pytest.raises(FleetConfigError, match=r"fleet\.json: replicas\.0\.spec: Field required"):
        await make_fleet(state_file=state_file)


async def test_who_reads_a_file_while_it_is_written_finds_it_whole(tmp_path: Path) -> None:
    path, texts = tmp_path / "ready", ["a" * 2_000_000, "b" * 2_000_000]
    write_whole(path, texts[0])
    for turn in range(20):
        writing = asyncio.create_task(asyncio.to_thread(write_whole, path, texts[turn % 2]))
        while not writing.done():
            assert await asyncio.to_thread(path.read_text) in texts
        await writing


async def test_a_state_file_that_cannot_be_written_is_named_at_the_start(make_fleet, tmp_path: Path) -> None:
    with pytest.raises(FleetConfigError, match=r"none/fleet\.json: cannot be written: No such file"):
        await make_fleet(state_file=tmp_path / "none" / "fleet.json")


async def test_the_process_start_time_is_when_loading_began(make_fleet, http) -> None:
    at = await make_fleet()
    await at.create("chat-0", gpus=[0])
    body = await at.running("chat-0")
    async with http.get(body["address"] + "/metrics/?name[]=process_start_time_seconds") as response:
        line = (await response.text()).splitlines()[-1]
    assert float(line.split()[1]) == body["start_time"]
    assert at.fleet.replicas["chat-0"].server.started_s >= body["start_time"] + 0.05


async def test_the_fleets_own_metrics(make_fleet, http) -> None:
    at = await make_fleet()
    await at.create("chat-0", gpus=[0])
    await at.running("chat-0")
    async with http.get(at.url + "/metrics") as response:
        page = await response.text()
    assert 'trimtab_fleet_replicas{state="running"} 1.0' in page
    assert 'trimtab_fleet_gpu_used_gib{gpu="0",node="node-0"} 34.0' in page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: []", "nodes: List should have at least 1 item"),
        ("nodes:\n- {node: a, gpuType: A100-40GB, gpus: 0}", r"nodes\.0\.gpus: Input should be greater"),
        ("nodes:\n- {node: a, gpuType: X9, gpus: 1}", "node a: gpu_type 'X9' has no known size"),
        (
            "nodes:\n- {node: a, gpuType: A100, gpus: 1}\n- {node: a, gpuType: A100, gpus: 1}",
            "node 'a' is listed twice",
        ),
        ("apiVersion: trimtab.dev/v1\nkind: Topology\nmetadata: {name: x}\nspec: {nods: []}", r"spec\.nodes: Field"),
        ("kind: Pool", r"apiVersion: Field required"),
        ("nodes: [", "is not closed|while parsing|expected"),
    ],
)
def test_a_topology_that_cannot_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    with pytest.raises(FleetConfigError, match=message):
        load_inventory(path)


def test_a_topology_resource_is_read(tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(
        "apiVersion: trimtab.dev/v1\nkind: Topology\nmetadata: {name: demo}\nspec:\n  nodes:\n"
        "  - {node: n-0, cluster: east, vdc: v, s2: a, s1: b, gpuType: H100-80GB, gpus: 8}\n"
        "  - {node: n-1, gpu_type: L40S, gpus: 2, gpuMemoryGib: 46}\n"
    )
    nodes = load_inventory(path).nodes
    assert [(n.node, n.cluster, n.gpu_type, n.memory_gib) for n in nodes] == [
        ("n-0", "east", "H100-80GB", 80.0),
        ("n-1", "local", "L40S", 46.0),
    ]


def fleet_process(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "simulator.fleet", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def get_json(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def test_the_command_serves_says_when_ready_and_ends_on_sigterm(free_ports, tmp_path: Path) -> None:
    admin, base, *_ = free_ports(16)
    ready = tmp_path / "ready"
    process = fleet_process(
        "--port", str(admin), "--server-port-base", str(base), "--ready-file", str(ready), "--bring-up-scale", "0"
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        url = ready.read_text().strip()
        assert url == f"http://127.0.0.1:{admin}"
        assert get_json(url + "/healthz") == {"status": "ok", "scales": {"time": 1.0, "bring_up": 0.0}}
        spec = {"replica": "a", "service": "s", "model": "dsllama-8b", "node": "node-0", "gpu_indices": [0]}
        request = urllib.request.Request(url + "/replicas", data=json.dumps(spec).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=30) as response:
            assert response.status == 201
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0, output
        assert "times are not as measured" in output
        assert not ready.exists()
        with pytest.raises(urllib.error.URLError):
            get_json(url + "/healthz")
    finally:
        process.kill()
        process.wait()


def test_a_busy_port_is_one_clear_line_and_exit_1(free_port: int) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        process = fleet_process("--port", str(free_port))
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output == (f"fleet: cannot listen on 127.0.0.1:{free_port}: Address already in use; choose another --port\n")
