"""What the documents name is there: modules, classes, functions, files; and the layers they draw are enforced."""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SERVICES = ("metrics_collector", "policy_engine", "prescheduler", "actuator")
PACKAGES = ("trimtab", "gateway", "lab", "simulator", "bench", *SERVICES)
FOLDERS = ("trimtab", "gateway", "lab", "simulator", "bench", "services", "tests", "protos", "deploy", "examples")
CODE = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
FILE = re.compile(rf"(?:{'|'.join((*FOLDERS, *SERVICES))})/[\w./*-]+")
# Not of Python: protobuf packages, labels and annotations, files of settings, images.
OTHER = re.compile(r"trimtab\.\w+\.v1\b.*|trimtab\.dev.*|trimtab\.commands|\w+\.(?:ya?ml|toml|json|proto)")


def _code(document: Path) -> list[str]:
    return CODE.findall(document.read_text())


def _is_there(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one, or a field or method of one of its classes."""
    parts = dotted.split(".")
    count = 1
    while count < len(parts) and importlib.util.find_spec(".".join(parts[: count + 1])) is not None:
        count += 1
        if importlib.util.find_spec(".".join(parts[:count])).submodule_search_locations is None:
            break
    value: object = importlib.import_module(".".join(parts[:count]))
    for position, part in enumerate(parts[count:], count + 1):
        if not hasattr(value, part):
            return position == len(parts) and part in getattr(value, "__annotations__", {})
        value = getattr(value, part)
    return True


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_of_ours_in_a_document_is_there(document: Path) -> None:
    named = {text.removesuffix("()") for text in _code(document)}
    ours = sorted(name for name in named if DOTTED.fullmatch(name) and not OTHER.fullmatch(name))
    assert [name for name in ours if not _is_there(name)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_names_is_there(document: Path) -> None:
    named = {text for text in _code(document) if FILE.fullmatch(text)}
    missing = [
        name
        for name in sorted(named)
        if not any((*ROOT.glob(name), *(ROOT / "services").glob(name), *(ROOT / "protos").glob(name)))
    ]
    assert missing == []


def test_the_drawing_of_the_layers_is_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    text = (ROOT / "docs" / "architecture.md").read_text()
    drawn = re.search(r"<!-- layers -->\n```\n(.*?)```", text, re.DOTALL)
    assert drawn is not None
    rows = [line.strip() for line in drawn[1].splitlines() if line.strip() and line.strip() != "▼"]
    assert [re.sub(r"\s+", " ", row) for row in rows] == layers


def test_the_map_of_the_packages_names_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    base = {f"trimtab.{path.parent.name}" for path in (ROOT / "trimtab").glob("*/__init__.py")}
    layers = {f"{name}.{layer}" for name in (*SERVICES, "gateway") for layer in ("core", "shell")}
    laboratory = {f"lab.{path.parent.name}" for path in (ROOT / "lab").glob("*/__init__.py")}
    assert {*base, *layers, *laboratory, "simulator"} - rows == set()
