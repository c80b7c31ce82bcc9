"""vLLM's HTTP surface and the backends, over real sockets against servers that answer well, wrongly or not at all."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from actuator.core.model import ActionKind, Gpu
from actuator.core.world import Action, Listed, Node, Outcome, RunState
from actuator.shell.backend import BackendError
from actuator.shell.engine_client import Gauges
from actuator.shell.executor import Executor
from actuator.shell.local_backend import LocalBackend
from actuator.shell.observer import Observer, look
from actuator.shell.settings import ActuatorSettings
from actuator.shell.static_backend import StaticBackend, TargetsFileError
from actuator.shell.vllm_client import VllmClient, VllmError, parse_gauges
from tests.support.old_vllm import OldVllm
from tests.unit.actuator.actuator_fleet_model import parts
from tests.unit.actuator.actuator_rig import LIMITS, spec
from trimtab.config.settings import SettingsError, load_settings
from trimtab.domain.dialects.dcgm import read_gpu_memory
from trimtab.domain.vocabulary import Role

PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 0.0
vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""
ASLEEP = PAGE.replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0')
ALL = Gauges(in_flight=6, memory_in_use=True, waiting=2, kv_usage=0.5)
PAGES = {
    "all engines added, the fullest cache": (PAGE, ALL),
    "asleep at level 1": (
        ASLEEP.replace('weights_offloaded"} 0.0', 'weights_offloaded"} 1.0'),
        replace(ALL, memory_in_use=False, sleep_level=1),
    ),
    "asleep at level 2": (
        ASLEEP.replace('discard_all"} 0.0', 'discard_all"} 1.0'),
        replace(ALL, memory_in_use=False, sleep_level=2),
    ),
    "asleep at level 0": (ASLEEP, replace(ALL, memory_in_use=False)),
    "a release without the sleep state": (
        "\n".join(PAGE.splitlines()[:4]),
        Gauges(in_flight=6, memory_in_use=None, waiting=2),
    ),
    "an old name": (PAGE.replace("kv_cache_usage", "gpu_cache_usage"), ALL),
    "a share that is none": (PAGE.replace("0.25", "NaN"), replace(ALL, kv_usage=None)),
    "a share above one": (PAGE.replace("0.25", "25"), replace(ALL, kv_usage=None)),
    "waiting is missing": ("vllm:num_requests_running 3\n", Gauges(in_flight=None, memory_in_use=None)),
    "not a number": (PAGE.replace("3.0", "NaN"), replace(ALL, in_flight=None)),
    "negative": (PAGE.replace("3.0", "-1"), replace(ALL, in_flight=None)),
    "infinite": (PAGE.replace("3.0", "+Inf"), replace(ALL, in_flight=None)),
    "a word": (PAGE.replace("3.0", "three"), replace(ALL, in_flight=None)),
    "cut off": (PAGE[:60], Gauges(in_flight=None, memory_in_use=None)),
    "empty": ("", Gauges(in_flight=None, memory_in_use=None)),
}


@pytest.mark.parametrize("what", sorted(PAGES))
def test_what_cannot_be_read_is_not_zero(what: str) -> None:
    page, expected = PAGES[what]
    assert parse_gauges(page) == expected


@pytest.fixture
async def client() -> AsyncIterator[VllmClient]:
    """Patient: a machine that stands still for a while is no fault of the server's."""
    made = VllmClient(probe_timeout_s=10.0, canary_timeout_s=10.0)
    yield made
    await made.close()


@pytest.fixture
async def impatient() -> AsyncIterator[VllmClient]:
    """For servers that do not answer."""
    made = VllmClient(probe_timeout_s=0.3, canary_timeout_s=0.5)
    yield made
    await made.close()


class Doer:
    """Runs one action and gives its outcome."""

    def __init__(self, client: VllmClient, *, may_act: bool = True) -> None:
        self._done: asyncio.Queue[Outcome] = asyncio.Queue()
        self._executor = Executor(StaticBackendStub(), client, LIMITS, self._done.put_nowait, may_act=lambda: may_act)

    async def __call__(self, kind: ActionKind, address: str, **fields) -> Outcome:
        self._executor.start(Action(kind=kind, replica="a-0", address=address, **fields))
        return await asyncio.wait_for(self._done.get(), 30)


class StaticBackendStub:
    """Nothing to create."""

    measures_gpus = False
    can_create = False


async def test_a_sleep_is_believed_only_from_is_sleeping(serve: Callable, client: VllmClient) -> None:
    server = OldVllm()
    address = await serve(server.handle)
    outcome = await Doer(client)(ActionKind.SLEEP, address, sleep_level=2)
    assert (outcome.ok, server.asleep) == (True, True)
    assert "POST /sleep?level=2&mode=wait" in server.calls


@pytest.mark.parametrize("running", [8, 1])
async def test_a_server_with_work_is_left_alone(serve: Callable, client: VllmClient, running: int) -> None:
    """Case 22: /sleep at running = 8 would abort all eight with a 200."""
    server = OldVllm()
    server.running = running
    outcome = await Doer(client)(ActionKind.SLEEP, await serve(server.handle))
    assert (outcome.ok, outcome.busy) == (False, True)
    assert not any("/sleep" in call for call in server.calls)


async def test_a_process_that_stood_still_and_lost_its_lease_puts_nothing_to_sleep(
    serve: Callable, client: VllmClient
) -> None:
    server = OldVllm()
    outcome = await Doer(client, may_act=False)(ActionKind.SLEEP, await serve(server.handle))
    assert (outcome.ok, outcome.unsettled) == (False, True)
    assert not any("/sleep" in call for call in server.calls)


async def test_a_server_without_sleep_routes_is_reported_as_such(serve: Callable, client: VllmClient) -> None:
    server = OldVllm()
    server.dev_mode = False
    address = await serve(server.handle)
    outcome = await Doer(client)(ActionKind.SLEEP, address)
    assert (outcome.ok, outcome.permanent) == (False, True)
    assert "VLLM_SERVER_DEV_MODE=1" in outcome.error
    probe = await look(client, address, now_s=1.0, misses=0)
    assert (probe.healthy, probe.sleeping, probe.in_flight) == (True, None, 0)


async def test_a_sleep_without_an_answer_may_still_happen(
    serve: Callable, client: VllmClient, impatient: VllmClient
) -> None:
    server = OldVllm()
    server.hang = {"/is_sleeping"}
    address = await serve(server.handle)
    server.asleep = False
    outcome = await Doer(impatient)(ActionKind.SLEEP, address)
    assert (outcome.ok, outcome.unsettled) == (False, True), "one that was asked for before may be under way"
    assert "POST /sleep?level=1&mode=abort" not in server.calls
    server.hang = {"/sleep"}
    executor_outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
    hasty = Executor(StaticBackendStub(), client, replace(LIMITS, sleeping_s=0.2), executor_outcomes.put_nowait)
    hasty.start(Action(kind=ActionKind.SLEEP, replica="a-0", address=address))
    outcome = await asyncio.wait_for(executor_outcomes.get(), 30)
    assert (outcome.ok, outcome.unsettled) == (False, True)


async def test_a_server_that_breaks_once_it_was_told_to_sleep_may_be_asleep(
    serve: Callable, client: VllmClient
) -> None:
    server = OldVllm()
    server.sleeps_and_breaks = True
    outcome = await Doer(client)(ActionKind.SLEEP, await serve(server.handle))
    assert (outcome.ok, outcome.unsettled, outcome.permanent) == (False, True, False)
    assert "500" in outcome.error


async def test_a_wake_is_checked_and_a_canary_wants_a_real_token(
    serve: Callable, client: VllmClient, impatient: VllmClient
) -> None:
    server = OldVllm()
    server.asleep = True
    address = await serve(server.handle)
    do = Doer(client)
    assert (await do(ActionKind.WAKE, address)).ok
    assert (await do(ActionKind.CANARY, address, model="m")).ok
    server.finish_reason = "abort"
    outcome = await do(ActionKind.CANARY, address, model="m")
    assert (outcome.ok, "gives no token" in outcome.error) == (False, True)
    server.hang = {"/v1/completions"}
    outcome = await Doer(impatient)(ActionKind.CANARY, address, model="m")
    assert (outcome.ok, "did not answer within 0.5 s" in outcome.error) == (False, True)


WAKES = {
    "its weights are in host memory": (1, 0, ["POST /wake_up"]),
    "its weights are gone": (
        2,
        0,
        [
            "POST /wake_up?tags=weights",
            "POST /collective_rpc",
            "POST /wake_up?tags=kv_cache",
            "POST /reset_prefix_cache?reset_running_requests=true",
        ],
    ),
    "the server knows better than the record": (1, 2, ["POST /wake_up?tags=weights", "POST /collective_rpc"]),
}


@pytest.mark.parametrize("case", sorted(WAKES))
async def test_what_a_wake_needs_at_each_level(case: str, serve: Callable, client: VllmClient) -> None:
    recorded, said, calls = WAKES[case]
    server = OldVllm()
    server.asleep, server.level = True, said
    assert (await Doer(client)(ActionKind.WAKE, await serve(server.handle), sleep_level=recorded)).ok
    assert not server.asleep
    posted = [call for call in server.calls if call.startswith("POST")]
    assert posted[: len(calls)] == calls
    assert server.reloaded is ("POST /collective_rpc" in calls)


async def test_weights_that_do_not_load_fail_the_wake(serve: Callable, client: VllmClient) -> None:
    """A token would come all the same, and mean nothing."""
    server = OldVllm()
    server.asleep, server.level, server.reload_status = True, 2, 500
    outcome = await Doer(client)(ActionKind.WAKE, await serve(server.handle), sleep_level=2)
    assert (outcome.ok, outcome.permanent) == (False, False)
    assert "/collective_rpc answers 500" in outcome.error
    assert server.asleep, "its KV cache was not given back, so it says that it sleeps"


@pytest.mark.parametrize(("answer", "ok"), [("", True), ('{"success":true}', True), ('{"success":false}', False)])
async def test_a_cache_of_other_weights_that_stays_fails_the_wake(
    answer: str, ok: bool, serve: Callable, client: VllmClient
) -> None:
    """Newer releases answer 200 also when they dropped nothing, since blocks were held."""
    server = OldVllm()
    server.asleep, server.level, server.reset_answer = True, 2, answer
    outcome = await Doer(client)(ActionKind.WAKE, await serve(server.handle), sleep_level=2)
    assert (outcome.ok, outcome.permanent) == (ok, False)
    assert ok or "/reset_prefix_cache did not drop" in outcome.error


async def test_a_canary_asks_for_the_served_model_when_none_is_known(serve: Callable, client: VllmClient) -> None:
    server = OldVllm()
    assert (await Doer(client)(ActionKind.CANARY, await serve(server.handle))).ok
    assert "GET /v1/models" in server.calls


async def test_a_pause_is_not_a_sleep(serve: Callable, client: VllmClient) -> None:
    server = OldVllm()
    server.paused = True
    probe = await look(client, await serve(server.handle), now_s=1.0, misses=2)
    assert (probe.sleeping, probe.paused, probe.misses) == (True, True, 0)


async def test_nothing_listening_and_no_answer_are_told_apart(
    serve: Callable, client: VllmClient, impatient: VllmClient, free_port: int
) -> None:
    gone = await look(client, f"http://127.0.0.1:{free_port}", now_s=1.0, misses=0)
    assert (gone.healthy, gone.refused, gone.misses) == (False, True, 1)
    server = OldVllm()
    server.hang = {"/health"}
    silent = await look(impatient, await serve(server.handle), now_s=1.0, misses=1)
    assert (silent.healthy, silent.refused, silent.misses) == (False, False, 2)


async def test_an_endless_answer_is_cut_off(serve: Callable) -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"x" * 2**20)
        return response

    patient = VllmClient(probe_timeout_s=20.0, canary_timeout_s=20.0)
    try:
        with pytest.raises(VllmError, match="answers more than"):
            await patient.gauges(await serve(flood))
    finally:
        await patient.close()


async def test_a_hung_server_delays_no_other(serve: Callable, tmp_path: Path, eventually: Callable) -> None:
    """Case 8."""
    good, hung = OldVllm(), OldVllm()
    hung.hang = {"/health"}
    good_address, hung_address = await serve(good.handle), await serve(hung.handle)
    targets = [
        {"targets": [good_address.removeprefix("http://")], "labels": {"service": "chat", "replica": "good"}},
        {"targets": [hung_address.removeprefix("http://")], "labels": {"service": "chat", "replica": "hung"}},
    ]
    path = tmp_path / "targets.json"
    path.write_text(json.dumps(targets))
    loop = asyncio.get_running_loop()
    # Many times as long as two looks at the good one take, whatever the machine does meanwhile.
    client = VllmClient(probe_timeout_s=1.5, canary_timeout_s=1.5)
    observer = Observer(StaticBackend(path), client, now_s=loop.time, interval_s=0.05, urgent_interval_s=0.02)
    stopping = asyncio.Event()
    task = asyncio.create_task(observer.run(stopping))
    await eventually(lambda: good.calls.count("GET /health") >= 2, what="a second look at the good one")
    assert hung.calls.count("GET /health") == 1, "still awaited, and never asked twice at once"
    assert observer.probe("good").healthy
    assert not observer.complete, "the hung one has not been looked at yet"
    await eventually(lambda: observer.complete)
    assert not observer.probe("hung").healthy
    stopping.set()
    await task
    await client.close()


class SlowList:
    """A backend whose list is asked for, and answers only when it is told to, with what there was when it was asked."""

    measures_gpus = False
    gpu_memory_age_s = 0.0
    can_create = False

    def __init__(self, listed: dict[str, Listed]) -> None:
        self.listed = listed
        self.may_answer = asyncio.Event()
        self.asked = asyncio.Event()

    async def list_replicas(self) -> dict[str, Listed]:
        before = dict(self.listed)
        self.asked.set()
        await self.may_answer.wait()
        return before

    def measured_nodes(self) -> None:
        return None

    async def list_nodes(self) -> dict[str, Node]:
        return {}

    async def gpu_memory(self) -> dict[Gpu, tuple[float, float]]:
        return {}


@pytest.fixture
async def looking(serve: Callable, client: VllmClient, eventually: Callable) -> AsyncIterator[SimpleNamespace]:
    """An observer with slow beats that has looked at one server; whose /health, and whose backend, can be held up."""
    server, may_answer, asked = OldVllm(), asyncio.Event(), asyncio.Event()
    may_answer.set()

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.set()
        await may_answer.wait()
        return await server.handle(request)

    address = await serve(handle)
    backend = SlowList({"a-0": Listed(**parts(spec("a-0", 0)), address=address, run_state=RunState.RUNNING)})
    backend.may_answer.set()
    loop = asyncio.get_running_loop()
    observer = Observer(backend, client, now_s=loop.time, interval_s=60.0, urgent_interval_s=30.0)
    observer.listen(urgent=lambda: frozenset({"a-0"}), on_news=lambda: None)
    stopping = asyncio.Event()
    task = asyncio.create_task(observer.run(stopping))
    assert await eventually(lambda: observer.complete)
    asked.clear()
    yield SimpleNamespace(observer=observer, backend=backend, asked=asked, may_answer=may_answer, now_s=loop.time)
    stopping.set()
    backend.may_answer.set()
    may_answer.set()
    await task


async def test_a_look_that_is_wanted_while_another_is_under_way_follows_it_at_once(
    looking: SimpleNamespace, eventually: Callable
) -> None:
    looking.may_answer.clear()
    looking.observer.look_soon()
    await looking.asked.wait()
    wanted_s = looking.now_s()
    looking.observer.look_soon()
    await asyncio.sleep(0.05)
    looking.may_answer.set()
    assert await eventually(lambda: looking.observer.probe("a-0").as_of_s > wanted_s)


async def test_a_look_that_is_wanted_soon_does_not_wait_for_a_slow_backend(
    looking: SimpleNamespace, eventually: Callable
) -> None:
    looking.backend.may_answer.clear()
    wanted_s = looking.now_s()
    looking.observer.look_soon()
    assert await eventually(lambda: looking.observer.probe("a-0").as_of_s > wanted_s)


async def test_a_list_from_before_a_deletion_does_not_bring_the_replica_back(
    client: VllmClient, eventually: Callable
) -> None:
    there = {"assist-0": Listed(**parts(spec("assist-0", 0)), address="http://127.0.0.1:1", run_state=RunState.RUNNING)}
    backend = SlowList(there)
    loop = asyncio.get_running_loop()
    observer = Observer(backend, client, now_s=loop.time, interval_s=0.02, urgent_interval_s=0.01)
    stopping = asyncio.Event()
    task = asyncio.create_task(observer.run(stopping))
    await backend.asked.wait()
    backend.listed = {}
    observer.forget("assist-0")
    backend.may_answer.set()
    await eventually(lambda: observer.world(frozenset()).listed is not None)
    assert observer.world(frozenset()).listed == {}
    backend.listed = there
    assert await eventually(lambda: observer.world(frozenset()).listed == there), "made anew under the same name"
    stopping.set()
    await task


NODES = {
    "nodes": [
        {
            "node": "node-0",
            "cluster": "local",
            "vdc": "v",
            "s2": "s2",
            "s1": "s1",
            "gpu_type": "A100-40GB",
            "gpus": 4,
            "free_gpu_indices": [1, 3],
            "something_new": True,
        },
        {
            "node": "far-0",
            "cluster": "far",
            "vdc": "v",
            "s2": "s2",
            "s1": "s1",
            "gpu_type": "H100-80GB",
            "gpus": 8,
            "free_gpu_indices": [],
        },
    ]
}


async def test_the_local_backend_reads_the_fleet(serve: Callable) -> None:
    async def fleet(request: web.Request) -> web.StreamResponse:
        if request.path == "/nodes":
            return web.json_response(NODES)
        item = {
            "replica": "a-0",
            "service": "a",
            "role": "prefill",
            "model": "m",
            "address": "http://127.0.0.1:1/",
            "node": "node-0",
            "gpu_indices": [0, 2],
            "state": "exited",
            "start_time": 12.5,
            "labels": {"trimtab.dev/pool": "p", "trimtab.dev/decision": "d-1"},
        }
        return web.json_response({"replicas": [item], "revision": 3})

    backend = LocalBackend(await serve(fleet), "local")
    nodes, replicas = await backend.list_nodes(), await backend.list_replicas()
    await backend.close()
    assert {name: node.taken for name, node in nodes.items()} == {"node-0": frozenset({0, 2})}
    listed = replicas["a-0"]
    assert (listed.spec.pool, listed.spec.decision_id, listed.spec.role) == ("p", "d-1", Role.PREFILL)
    assert (listed.address, listed.run_state, listed.start_time_s) == ("http://127.0.0.1:1", RunState.EXITED, 12.5)


BAD_ANSWERS = {
    "half a list": (200, '{"replicas": [{"replica": "a-0"}]}', "replicas.0.service: Field required"),
    "no JSON": (200, "<html>", "Invalid JSON"),
    "an error": (500, '{"error": "on fire"}', "500: on fire"),
    "another shape": (200, "[]", "Input should be an object"),
}


@pytest.mark.parametrize("what", sorted(BAD_ANSWERS))
async def test_a_list_that_does_not_parse_is_no_list(serve: Callable, what: str) -> None:
    status, text, message = BAD_ANSWERS[what]

    async def fleet(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    backend = LocalBackend(await serve(fleet), "local")
    with pytest.raises(BackendError) as caught:
        await backend.list_replicas()
    await backend.close()
    assert message in str(caught.value)


CREATIONS = {201: None, 200: None, 400: True, 409: False, 500: False}


@pytest.mark.parametrize("status", sorted(CREATIONS))
async def test_whether_a_creation_is_worth_trying_again(serve: Callable, status: int) -> None:
    bodies = []

    async def fleet(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.json_response({"error": "why"}, status=status)

    backend = LocalBackend(await serve(fleet), "local")
    permanent: bool | None = None
    try:
        await backend.create_replica(spec("a-0", 1, pool="p"))
    except BackendError as error:
        permanent = error.permanent
    await backend.close()
    assert permanent == CREATIONS[status]
    assert (bodies[0]["gpu_indices"], bodies[0]["labels"]) == ([1], {"trimtab.dev/pool": "p"})


async def test_deleting_what_is_gone_is_fine(serve: Callable) -> None:
    async def fleet(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "unknown"}, status=404)

    backend = LocalBackend(await serve(fleet), "local")
    assert await backend.delete_replica("a-0") is None
    await backend.close()


BAD_TARGETS = {
    "not a list": ("{}", "expected a list of groups"),
    "no port": ('[{"targets": ["host"], "labels": {"service": "a"}}]', "'host' must be host:port"),
    "no service": ('[{"targets": ["h:1"]}]', "label service is ''"),
    "a role that is none": ('[{"targets": ["h:1"], "labels": {"service": "a", "role": "x"}}]', "label role is 'x'"),
    "GPUs that are none": (
        '[{"targets": ["h:1"], "labels": {"service": "a", "gpu_indices": "0-1"}}]',
        "label gpu_indices is '0-1'",
    ),
    "twice": (
        '[{"targets": ["h:1", "h:2"], "labels": {"service": "a", "replica": "r"}}]',
        "one replica cannot have 2 targets",
    ),
    "broken": ("[", "targets.json"),
}


@pytest.mark.parametrize("what", sorted(BAD_TARGETS))
def test_a_targets_file_that_does_not_parse_names_the_place(tmp_path: Path, what: str) -> None:
    text, message = BAD_TARGETS[what]
    path = tmp_path / "targets.json"
    path.write_text(text)
    with pytest.raises(TargetsFileError) as caught:
        StaticBackend(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


EXPORTED = """\
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",Hostname="h"} 1536
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a",Hostname="h"} 38400
DCGM_FI_DEV_FB_RESERVED{gpu="0",UUID="GPU-a",Hostname="h"} 1024
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-b",Hostname="h"} 34816
DCGM_FI_DEV_FB_FREE{gpu="1",UUID="GPU-b",Hostname="h"} 6144
"""
EXPORTS = {
    "used, free and reserved": (EXPORTED, {0: (1.5, 40.0), 1: (34.0, 40.0)}),
    "a field that DCGM could not read": (EXPORTED.replace(" 1536", " 9223372036854775794"), {1: (34.0, 40.0)}),
    "no number": (EXPORTED.replace(" 38400", " NaN"), {1: (34.0, 40.0)}),
    "no free memory told": (EXPORTED.replace('FB_FREE{gpu="1"', 'FB_X{gpu="1"'), {0: (1.5, 40.0)}),
    "two pods, one number": (EXPORTED + EXPORTED.splitlines()[1] + "\n", {0: (1.5, 40.0), 1: (34.0, 40.0)}),
    "two pods, two numbers": (EXPORTED + 'DCGM_FI_DEV_FB_USED{gpu="0",pod="p"} 7\n', {1: (34.0, 40.0)}),
    "an instance of a partitioned GPU": (EXPORTED.replace('gpu="0"', 'gpu="0",GPU_I_ID="3"'), {1: (34.0, 40.0)}),
    "cut off": (EXPORTED[:120], {}),
    "another page": ("<html>", {}),
}


@pytest.mark.parametrize("what", sorted(EXPORTS))
def test_what_an_exporter_says_of_memory(what: str) -> None:
    page, expected = EXPORTS[what]
    assert read_gpu_memory(page.encode()) == expected


async def test_memory_of_given_servers_is_measured_where_the_file_names_an_exporter(
    serve: Callable, tmp_path: Path
) -> None:
    answers = {"text": EXPORTED, "status": 200}

    async def exporter(request: web.Request) -> web.Response:
        return web.Response(text=str(answers["text"]), status=int(str(answers["status"])))

    address = (await serve(exporter)).removeprefix("http://")
    path = tmp_path / "targets.json"
    servers = {"targets": ["127.0.0.1:1"], "labels": {"service": "chat", "node": "gpu-a", "gpu_indices": "0"}}
    exporters = {"targets": [address], "labels": {"exporter": "dcgm", "node": "gpu-a"}}
    path.write_text(json.dumps([servers, exporters]), encoding="utf-8")
    backend = StaticBackend(path, exporter_interval_s=2.0)
    try:
        assert list(await backend.list_replicas()) == ["127.0.0.1:1"], "the exporter is no server"
        assert (backend.measures_gpus, backend.measured_nodes()) == (True, {"gpu-a"})
        assert await backend.gpu_memory() == {("gpu-a", 0): (1.5, 40.0), ("gpu-a", 1): (34.0, 40.0)}
        observer = Observer(
            backend,
            VllmClient(probe_timeout_s=0.2, canary_timeout_s=0.2),
            now_s=lambda: 100.0,
            interval_s=1,
            urgent_interval_s=1,
        )
        await observer._ask_backend()
        assert observer.world(frozenset()).gpu_memory["gpu-a", 0].as_of_s == 98.0, "as old as the exporter's interval"
        answers["status"] = 500
        assert await backend.gpu_memory() == {}, "what was not measured is not free"
        exporters["labels"] = {"exporter": "dcgm"}
        path.write_text(json.dumps([servers, exporters]), encoding="utf-8")
        with pytest.raises(BackendError, match="must name the node whose GPUs it shows"):
            await backend.list_replicas()
    finally:
        await backend.close()


async def test_a_static_backend_creates_nothing_and_keeps_the_last_good_list(tmp_path: Path) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text("- targets: ['10.0.0.7:8000']\n  labels: {service: chat, node: gpu-a, gpu_indices: '0,1'}\n")
    backend = StaticBackend(path)
    listed = (await backend.list_replicas())["10.0.0.7:8000"]
    assert (listed.placement.node, listed.placement.gpu_indices, listed.address) == (
        "gpu-a",
        (0, 1),
        "http://10.0.0.7:8000",
    )
    assert (await backend.list_nodes())["gpu-a"].taken == {0, 1}
    with pytest.raises(BackendError) as caught:
        await backend.create_replica(spec("a-0", 1))
    assert caught.value.permanent
    path.write_text("- targets: [nonsense]\n")
    with pytest.raises(BackendError, match="the last good list stays"):
        await backend.list_replicas()
    path.write_text("- targets: ['10.0.0.8:8000']\n  labels: {service: chat}\n")
    assert list(await backend.list_replicas()) == ["10.0.0.8:8000"]


WRONG_SETTINGS = {
    "no file": (["--backend", "static"], "backend static needs targets_file"),
    "a URL that is none": (["--fleet-url", "here"], "fleet_url starts with http"),
    "a cluster that is none": (["--cluster", "A B"], "--cluster"),
    "a negative time": (["--default-drain-s", "-1"], "--default-drain-s"),
    "unknown": (["--fleet", "x"], "unknown flag --fleet"),
}


@pytest.mark.parametrize("what", sorted(WRONG_SETTINGS))
def test_a_wrong_setting_is_one_clear_line(what: str) -> None:
    argv, message = WRONG_SETTINGS[what]
    with pytest.raises(SettingsError) as caught:
        load_settings(ActuatorSettings, argv, {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
