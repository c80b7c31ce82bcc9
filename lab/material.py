"""The folder of measured tables and recorded traces, the same for every command and no part of the repository.

Below it are `data/perf` and `data/lifecycle` (docs/profiles.md), `data/traces` (docs/workloads.md) and, for the tests,
`vllm/captures`.
"""

from __future__ import annotations

from pathlib import Path

MEANING = "Folder that holds data/ with measured tables; docs/profiles.md says which."
"""Of every `--material`, as its help says."""


class MaterialError(ValueError):
    """The folder is missing or is not one of material; the message has what is expected."""


def perf_folder(material: Path) -> Path:
    """The folder of measured tables below `material`. Raises MaterialError."""
    perf = material / "data" / "perf"
    if not perf.is_dir():
        why = "no such folder" if not material.is_dir() else "no data/perf in it"
        raise MaterialError(
            f"{material}: {why}; name the folder that holds data/: docs/profiles.md says what belongs there and where "
            "it is from"
        )
    return perf
