"""What the documents say is there is there: links, commands, make targets; and they name no machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import typer.main

from trimtab.cli.addresses import SERVER_PORTS, LocalAddresses
from trimtab.cli.main import app

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def _tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listing.split("\0") if name]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    text = FENCE.sub("", document.read_text())
    broken = []
    for target, anchor in LINK.findall(text):
        if "://" in target:
            continue
        path = (document.parent / target).resolve()
        if not path.exists() or (anchor and path.suffix == ".md" and anchor[1:] not in _anchors(path)):
            broken.append(target + anchor)
    assert broken == []


def _anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ +(.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_document_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for target, _ in LINK.findall(path.read_text()):
            found = (path.parent / target).resolve()
            if found.is_dir():
                todo += sorted(found.glob("*.md"))
            elif found.suffix == ".md" and found.exists():
                todo.append(found)
    missing = [str(path.relative_to(ROOT)) for path in DOCUMENTS if path not in seen and path.name != "CHANGELOG.md"]
    assert missing == []


def test_every_command_that_a_document_shows_exists() -> None:
    group = typer.main.get_group(app)
    commands = set(group.list_commands(typer.Context(group)))
    shown = {
        (document.name, word)
        for document in DOCUMENTS
        for word in re.findall(r"(?:^|bin/|`)trimtab ([a-z]+)", document.read_text(), re.MULTILINE)
    }
    assert shown
    assert {item for item in shown if item[1] not in commands} == set()


def test_the_readme_has_every_port_of_a_local_stack() -> None:
    single = LocalAddresses().single_ports()
    offsets = LocalAddresses(port_base=0)

    def cell(name: str) -> str:
        return f" {single[name]} (+{offsets.port(name)}) " if name in single else " "

    parts = [name for name in single if not name.endswith("-metrics")]
    rows = [f"| {part} |{cell(part)}|{cell(f'{part}-metrics')}|" for part in parts]
    first, last = (LocalAddresses().port("servers") + shift for shift in (0, SERVER_PORTS - 1))
    to = offsets.port("servers")
    rows.append(f"| simulated servers | {first} (+{to}) to {last} (+{to + SERVER_PORTS - 1}) | |")
    table = "\n".join(["| part | listens on | metrics |", "|---|---|---|", *rows])
    assert table in (ROOT / "README.md").read_text()
    assert sorted(single) == sorted([*parts, *(f"{part}-metrics" for part in parts if f"{part}-metrics" in single)])


def test_every_make_target_that_a_document_shows_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {
        word
        for document in DOCUMENTS
        for word in re.findall(r"(?:^|`|=\d+ )make ([a-z]+)", document.read_text(), re.MULTILINE)
    }
    assert {"demo", "test"} <= shown
    assert shown - targets == set()


def test_no_tracked_file_names_a_machine_or_a_registry_host() -> None:
    """Built from parts, so that this file does not find itself."""
    marks = ["/" + "work/", "/" + "root/", "pypi." + "org/simple", "files.python" + "hosted"]
    found = []
    for path in _tracked():
        if path.suffix in (".binpb", ".png", ".svg", ".gz") or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {mark}" for mark in marks if mark in text]
    assert found == []
