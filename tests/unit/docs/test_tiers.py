"""Every tier of tests is run by `make test`, by .ci/run, or on demand alone, and each by one of them."""

import socket
import tomllib
from pathlib import Path

import pytest

from tests.support.ports import BLOCK_PORTS, SINGLES, claim_block, claim_stack, is_free

ROOT = Path(__file__).parents[3]
ON_DEMAND = {"vllm"}
NO_TIERS = {"data", "support", "__pycache__"}


def tiers() -> set[str]:
    return {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - NO_TIERS


def test_make_test_and_ci_share_the_tiers_out() -> None:
    quick = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["testpaths"])
    # What is run in part once more, under another profile or store, is no tier.
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if " -m costly" not in line]
    ci = "\n".join(line for line in lines if " -m store" not in line)
    rest = {f"tests/{tier}" for tier in tiers() if f"tests/{tier}" in ci}
    assert quick & rest == set()
    assert quick | rest == {f"tests/{tier}" for tier in tiers() - ON_DEMAND}


def test_a_test_has_its_folders_mark(request: pytest.FixtureRequest) -> None:
    marks = {mark.name for mark in request.node.iter_markers()}
    assert marks & tiers() == {"unit"}


def test_two_processes_get_no_port_in_common() -> None:
    """The ranges are held by sockets, so that two claims of one process are as apart as those of two."""
    first, second = claim_block(), claim_block()
    assert set(first.take(40)).isdisjoint(second.take(40))
    one, held = claim_stack()
    other, held_too = claim_stack()
    with held, held_too:
        assert one != other


def test_ports_come_side_by_side_and_none_twice_before_the_block_is_through() -> None:
    """Ten of which one is taken, be it by a connection that ended just now, are passed over."""
    block = claim_block()
    given = [block.take(10)]
    while (found := block.take(10))[0] > given[-1][0]:
        given.append(found)
    ports = [port for ten in given for port in ten]
    assert all(ten == list(range(ten[0], ten[0] + 10)) for ten in given)
    assert 10 <= len(set(ports)) == len(ports) < BLOCK_PORTS
    assert all(port in SINGLES for port in ports)


def test_a_taken_port_is_passed_over() -> None:
    block = claim_block()
    (before,) = block.take()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
        taken = next(port for port in range(before + 1, before + 100) if is_free(port))
        other.bind(("127.0.0.1", taken))
        assert not is_free(taken)
        assert taken not in block.take(taken - before + 5)
