"""What `trimtab chaos` and `trimtab demo` delete before they start: their own last run, and nothing else."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lab.commands.fresh import MARKER_NAME, fresh_folder
from tests.services.cli.test_errors import run, the_line
from trimtab.cli.addresses import LocalAddresses
from trimtab.cli.local import lock_folder
from trimtab.cli_errors import CommandError

COMMANDS = ["chaos", "demo"]


def below(folder: Path) -> dict[str, str]:
    """Every file and what is in it."""
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def addresses(module_port_base: int) -> LocalAddresses:
    """Ports that nobody uses."""
    return LocalAddresses(port_base=module_port_base)


def test_a_run_finds_nothing_of_the_one_before(tmp_path: Path, addresses: LocalAddresses) -> None:
    folder = tmp_path / "state" / "chaos"
    with fresh_folder(folder, addresses, command="chaos"):
        (folder / "store" / "deep").mkdir(parents=True)
        (folder / "store" / "deep" / "dump").write_text("old")
        (folder / "chaos.json").write_text("old")
        (tmp_path / "kept").mkdir()
        (tmp_path / "kept" / "file").write_text("kept")
        (folder / "link").symlink_to(tmp_path / "kept")
    with fresh_folder(folder, addresses, command="chaos"):
        assert sorted(path.name for path in folder.iterdir()) == sorted([MARKER_NAME, "lock"])
    assert below(tmp_path / "kept") == {"file": "kept"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_of_that_name_that_is_somebody_elses_is_left_as_it_is(tmp_path: Path, command: str) -> None:
    folder = tmp_path / command
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "thesis.txt").write_text("three years of work")
    before = below(tmp_path)
    line = the_line(run(command, "--duration", "20", "--state-dir", str(tmp_path)))
    assert str(folder) in line
    assert "another folder with --state-dir" in line
    assert below(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_run_is_refused_whatever_its_ports_and_leaves_the_first_alone(
    tmp_path: Path, addresses: LocalAddresses, command: str
) -> None:
    folder = tmp_path / command
    with fresh_folder(folder, addresses, command=command):
        (folder / "logs").mkdir()
        (folder / "logs" / "gateway.log").write_text("of the first run")
        before = below(tmp_path)
        for port_base in (addresses.port_base, addresses.port_base + 1):
            base = str(port_base)
            line = the_line(run(command, "--duration", "20", "--port-base", base, "--state-dir", str(tmp_path)))
            assert f"another stack runs in {folder}" in line
            assert below(tmp_path) == before


def test_nothing_is_deleted_while_a_port_is_taken(tmp_path: Path, addresses: LocalAddresses) -> None:
    with fresh_folder(tmp_path, addresses, command="chaos"):
        (tmp_path / "chaos.json").write_text("counts")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as busy:
        busy.bind(("127.0.0.1", addresses.port("gateway")))
        busy.listen()
        with (
            pytest.raises(CommandError, match=r"port \d+ \(gateway\)"),
            fresh_folder(tmp_path, addresses, command="chaos"),
        ):
            pass
    assert (tmp_path / "chaos.json").read_text() == "counts"
    with fresh_folder(tmp_path, addresses, command="chaos"):
        assert not (tmp_path / "chaos.json").exists()


def test_nothing_is_deleted_while_a_stack_runs_in_a_folder_within(tmp_path: Path, addresses: LocalAddresses) -> None:
    with fresh_folder(tmp_path, addresses, command="demo"):
        (tmp_path / "figures").write_text("of the last demo")
    lock = lock_folder(tmp_path / "policy")
    try:
        with (
            pytest.raises(CommandError, match=r"another stack runs in .*policy"),
            fresh_folder(tmp_path, addresses, command="demo"),
        ):
            pass
    finally:
        os.close(lock)
    assert (tmp_path / "figures").exists()


def test_the_lock_goes_with_the_block_also_when_that_fails(tmp_path: Path, addresses: LocalAddresses) -> None:
    with pytest.raises(ZeroDivisionError), fresh_folder(tmp_path, addresses, command="chaos"):
        raise ZeroDivisionError
    with fresh_folder(tmp_path, addresses, command="chaos"):
        assert (tmp_path / MARKER_NAME).read_text()
