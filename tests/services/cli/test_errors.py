"""What a user gets wrong: one clear line, a non-zero exit, and no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from trimtab.cli.addresses import LocalAddresses
from trimtab.cli.main import main
from trimtab.cli.resources import read_resources
from trimtab.store import keys
from trimtab.store.embedded import EmbeddedStore

TRIMTAB = [sys.executable, "-m", "trimtab.cli.main"]
GOOD = """
apiVersion: trimtab.dev/v1
kind: ServicePolicy
metadata: {name: chat}
spec:
  model: m
  slo: {ttftS: 1, tpotS: 0.1}
  roles: [{role: colocated, maxReplicas: 2}]
  tokenServiceShare: {thetaTps: 20}
"""


def run(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """One command, as a user's shell runs it."""
    return subprocess.run(
        [*TRIMTAB, *argv], capture_output=True, text=True, timeout=60, check=False, env=os.environ | (env or {})
    )


Inside = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    """`run` without a process of its own, for what needs none: the same entry point, in a hundredth of the time."""

    def command(*argv: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["trimtab", *argv])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        status = ended.value.code
        return subprocess.CompletedProcess(argv, status if isinstance(status, int) else 0, shown.out, shown.err)

    return command


def the_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line on stderr of a command that failed."""
    assert done.returncode not in (0, -6, -11), done.stdout
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1, 2", ":1:9: "),
        ("a: 1\na: 2\n", "given twice"),
        ("", "no resource in"),
        ("- 1\n- 2\n", "a resource is a mapping"),
        (GOOD.replace("kind: ServicePolicy", "kind: Deployment"), "kind: must be ServicePolicy or Pool"),
        (GOOD.replace("maxReplicas: 2", "maxReplicas: 2, colour: red"), "spec.roles[0].colour: unknown field"),
        (GOOD.replace("maxReplicas: 2", "maxReplicas: 2, minReplicas: 3"), "minReplicas 3 is above maxReplicas 2"),
        (GOOD.replace("thetaTps: 20", "thetaTps: .nan"), "spec.tokenServiceShare.thetaTps"),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_sent(inside: Inside, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "resources.yaml"
    path.write_text(text)
    line = the_line(inside("apply", "-f", str(path)))
    assert words in line
    assert str(path) in line


POOL = """
apiVersion: trimtab.dev/v1
kind: Pool
metadata: {name: shared}
spec:
  cluster: local
  gpus: [{node: n, gpuIndices: [0, 1]}]
  members: [{service: chat, initialAwake: 1}]
"""


@pytest.mark.parametrize("dry", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("files", "places"),
    [
        ({"a.yaml": POOL + "---" + POOL}, ("a.yaml (document 2): Pool shared", "a.yaml (document 1) already")),
        ({"a.yaml": POOL, "b.yaml": GOOD + "---" + POOL}, ("b.yaml (document 2): Pool shared", "a.yaml already")),
        ({"a.yaml": GOOD, "b.yaml": GOOD}, ("b.yaml: ServicePolicy chat", "a.yaml already")),
    ],
    ids=["in one file", "in two files", "of a service"],
)
def test_a_second_resource_of_one_name_is_refused_with_both_places(
    inside: Inside, tmp_path: Path, files: dict[str, str], places: tuple[str, ...], dry: list[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    line = the_line(inside("apply", "-f", str(tmp_path), *dry))
    assert [place for place in places if place not in line] == []


def test_a_pool_and_a_service_may_have_one_name_and_so_a_file_is_read_on(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(POOL.replace("name: shared", "name: chat") + "---" + GOOD)
    kinds = [resource.kind for resource in read_resources([tmp_path])]
    assert kinds == ["ServicePolicy", "Pool"]


def test_a_file_that_is_not_there_is_named(inside: Inside, tmp_path: Path) -> None:
    assert "no.yaml: No such file" in the_line(inside("apply", "-f", str(tmp_path / "no.yaml")))


def test_nobody_at_the_address_is_said_with_what_to_do(inside: Inside, tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    path.write_text(GOOD)
    line = the_line(inside("--policy-address", "127.0.0.1:1", "apply", "-f", str(path)))
    assert "127.0.0.1:1" in line
    assert "trimtab up" in line


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["status"], "policy"),
        (["status", "--json"], "policy"),
        (["decisions"], "policy"),
        (["explain", "d-1"], "policy"),
        (["get", "pools"], "policy"),
        (["pause", "pool", "shared"], "policy"),
        (["topology"], "prescheduler"),
        (["targets"], "collector"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else item,
)
def test_without_a_stack_a_command_says_how_to_start_one(
    inside: Inside, argv: list[str], part: str, module_port_base: int
) -> None:
    line = the_line(inside("--port-base", str(module_port_base), *argv))
    assert LocalAddresses(port_base=module_port_base).address(part) in line
    assert "(Connection refused): start a stack with `trimtab up`" in line
    assert "--port-base" in line
    assert "last error" not in line


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1:99999", "::1:80"])
def test_an_address_that_is_none_is_refused(inside: Inside, address: str) -> None:
    assert "--policy-address" in the_line(inside("--policy-address", address, "status"))


def test_a_busy_port_is_named_with_its_part(tmp_path: Path, module_port_base: int) -> None:
    port = LocalAddresses(port_base=module_port_base).single_ports()["policy"]
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as busy:
        busy.bind(("127.0.0.1", port))
        busy.listen()
        line = the_line(run("up", "--headless", "--port-base", str(module_port_base), "--state-dir", str(tmp_path)))
    assert f"port {port} (policy)" in line
    assert "--port-base" in line


def test_a_folder_that_cannot_be_written_to_is_named() -> None:
    line = the_line(run("up", "--headless", "--state-dir", "/proc/self/trimtab"))
    assert "/proc/self/trimtab" in line
    assert "--state-dir" in line


def test_targets_that_are_not_there_are_named(inside: Inside, tmp_path: Path) -> None:
    line = the_line(inside("up", "--targets", str(tmp_path / "no.yaml"), "--state-dir", str(tmp_path)))
    assert "no.yaml: no such file" in line


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2"),
        ("trace.jsonl", '{"timestamp": 1, "input_length": -5, "output_length": 1}\n', "line 1"),
        ("trace.jsonl", "", "trace.jsonl"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(inside: Inside, tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert words in the_line(inside("demo", "--trace", str(path), "--state-dir", str(tmp_path)))


@pytest.mark.parametrize("package", ["metrics_collector", "policy_engine", "prescheduler", "actuator", "gateway"])
def test_a_service_refuses_an_unknown_setting_with_one_line(package: str, tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("colour: red\n")
    done = subprocess.run(
        [sys.executable, "-m", package, "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    line = the_line(done)
    assert "colour" in line
    assert str(config) in line


def test_a_store_of_another_release_is_named_with_what_to_do(tmp_path: Path, module_port_base: int) -> None:
    addresses = LocalAddresses(port_base=module_port_base)
    store = EmbeddedStore(addresses.port("store"), tmp_path / "store")
    store.start()
    try:
        with redis.Redis(port=addresses.port("store")) as client:
            client.set(keys.SCHEMA, "0")
    finally:
        store.stop()
    line = the_line(run("up", "--headless", "--port-base", str(module_port_base), "--state-dir", str(tmp_path)))
    assert "older schema 0" in line


@pytest.mark.parametrize("given", ["nowhere", "material/data", "material/data/perf"])
def test_material_is_the_folder_that_holds_data(inside: Inside, given: str, tmp_path: Path) -> None:
    (tmp_path / "material" / "data" / "perf").mkdir(parents=True)
    line = the_line(inside("simulate", "profile", "--material", str(tmp_path / given)))
    assert str(tmp_path / given) in line
    assert "name the folder that holds data/" in line
    assert "docs/profiles.md" in line


@pytest.mark.parametrize("argv", [["lab.fit_profiles"], ["bench.fidelity", "--material"]], ids=lambda argv: argv[0])
def test_so_it_is_for_the_commands_of_the_repository(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "perf").mkdir()
    command = [sys.executable, "-m", *argv, str(tmp_path)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=root)
    assert f"{tmp_path}: no data/perf in it; name the folder that holds data/" in the_line(done)


def test_a_bench_whose_material_is_not_where_it_looks_says_how_to_pass_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.fidelity", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TRIMTAB_TEST_MATERIAL": str(tmp_path / "nowhere")},
    )
    assert done.returncode == 2
    line = the_line(done)
    assert line.startswith(f"fidelity: {tmp_path / 'nowhere'}: no such folder; name the folder that holds data/")
    assert line.endswith("pass it with --material FOLDER or TRIMTAB_TEST_MATERIAL")


def test_a_table_that_the_material_lacks_is_named_with_where_they_are_listed(inside: Inside, tmp_path: Path) -> None:
    (tmp_path / "data" / "perf").mkdir(parents=True)
    line = the_line(inside("simulate", "profile", "--material", str(tmp_path)))
    assert f"{tmp_path}/data/perf/aiconfigurator/silicon_e2e.csv.gz: no such table" in line
    assert "docs/profiles.md" in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["status", "--bogus"], "no such option: --bogus (see `trimtab status --help`)"),
        (["explain"], "missing argument 'DECISION or OPERATION' (see `trimtab explain --help`)"),
        (["calibrate", "--profile", "h100-8b-tp1"], "missing option '--slo-ttft'"),
        (["evaluate", "smoke", "--seeds", "many"], "invalid value for '--seeds'"),
        (["up", "--port-base", "0"], "'--port-base'"),
        (["calibrate", "--slo-ttft", "1", "--slo-tpot", "1", "--form", "round"], "'answers', 'fixed'"),
        (["status", "a", "b"], "unexpected extra argument"),
        (["nosuch"], "no such command 'nosuch' (see `trimtab --help`)"),
        (["simulate", "profil"], "(see `trimtab simulate --help`)"),
        (["apply", "-f"], "'-f'"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else "",
)
def test_a_command_line_that_is_wrong_is_told_in_one_line(inside: Inside, argv: list[str], words: str) -> None:
    done = inside(*argv)
    assert done.returncode == 2
    line = the_line(done)
    assert line.startswith("trimtab: ")
    assert words in line
    assert "--help`)" in line


@pytest.mark.parametrize("module", ["simulator.traces", "simulator.fleet", "lab.studies.signals"])
def test_so_it_is_by_the_commands_of_simulator_and_lab(module: str) -> None:
    command = [sys.executable, "-m", module, "--bogus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert the_line(done).startswith(f"{module}: no such option: --bogus ")


def test_without_a_command_there_is_help_and_with_it_a_status_of_success(inside: Inside) -> None:
    bare, asked = inside(), inside("--help")
    assert (bare.returncode, asked.returncode) == (2, 0)
    assert "Usage: trimtab" in bare.stdout
    assert "Traceback" not in bare.stderr
    assert "Usage: trimtab" in asked.stdout
