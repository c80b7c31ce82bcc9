"""Bundled scenarios: the nodes of a simulated fleet and the resources that go with them."""

from pathlib import Path


def scenario_folder(name: str) -> Path:
    """The folder of a scenario: `topology.yaml` and `resources/`. Raises FileNotFoundError."""
    folder = Path(__file__).parent / name
    if not (folder / "topology.yaml").is_file():
        raise FileNotFoundError(f"no scenario {name!r}")
    return folder
