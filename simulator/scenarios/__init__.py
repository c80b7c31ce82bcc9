"""Bundled scenarios: the nodes of a simulated fleet and the resources that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scenario as the fleet runs it."""

    name: str
    topology: Path
    """The file of its nodes."""
    resources: Mapping[str, str]
    """File name → YAML text, by name."""


def scenario_folder(name: str) -> Path:
    """The folder of a scenario: `topology.yaml` and `resources/`. Raises FileNotFoundError."""
    folder = Path(__file__).parent / name
    if not (folder / "topology.yaml").is_file():
        raise FileNotFoundError(f"no scenario {name!r}; there is {', '.join(scenario_names())}")
    return folder


def scenario_names() -> list[str]:
    """Every bundled scenario."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/topology.yaml"))


def load_scenario(name: str) -> Scenario:
    """A scenario with the text of its resources. Raises FileNotFoundError."""
    folder = scenario_folder(name)
    files = sorted((folder / "resources").glob("*.yaml"))
    resources = {file.name: file.read_text(encoding="utf-8") for file in files}
    return Scenario(name=name, topology=folder / "topology.yaml", resources=resources)
