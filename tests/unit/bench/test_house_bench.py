"""The bench of the layers and of what an install and a start cost."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import house


def test_imports_up_are_found_wherever_they_stand(tmp_path: Path) -> None:
    for folder in ("trimtab", "services/actuator", "gateway", "simulator"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "trimtab" / "a.py").write_text(
        "import lab.virtual\nimport labels\n\n\ndef f():\n    import simulator\n"
    )
    (tmp_path / "services" / "actuator" / "b.py").write_text("from simulator.core import engine\nfrom . import lab\n")
    (tmp_path / "gateway" / "c.py").write_text("import importlib\nimportlib.import_module('lab.suites')\n")
    (tmp_path / "simulator" / "d.py").write_text("import lab\n")
    assert house.imports_up(tmp_path) == [
        "trimtab/a.py:1: lab.virtual",
        "trimtab/a.py:6: simulator",
        "services/actuator/b.py:1: simulator.core",
        "gateway/c.py:2: lab.suites",
    ]


def test_nothing_below_imports_simulator_or_lab() -> None:
    found = house.base_imports_up()
    assert found.details == {"imports": []}
    assert found.ok


def test_a_history_without_the_baseline_is_not_measured(tmp_path: Path) -> None:
    measured = house.production_install_ratio("0" * 40, "HEAD", tmp_path)
    assert measured.value is None
    assert not measured.ok
    assert "no commit" in str(measured.details["not_measured"])
    report = house.run({"production_install_ratio": lambda: measured}, {})
    assert report["bars"] == [{"name": "production_install_ratio", "value": "not measured", "bar": 0.65, "ok": False}]


def test_a_folder_that_is_no_repository_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(house.NotMeasured):
        house.resolve("HEAD", root=tmp_path)


def test_an_install_is_measured_once_for_two_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=house.ROOT, capture_output=True, text=True, check=True)
    installed: list[str] = []

    def install_bytes(commit: str) -> int:
        installed.append(commit)
        return 1_000

    monkeypatch.setattr(house, "install_bytes", install_bytes)
    for _ in range(2):
        measured = house.production_install_ratio("HEAD", "HEAD", tmp_path)
        assert measured.value == 1.0
    assert installed == [head.stdout.strip()] * 2


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"123")
    assert house.size_of(tmp_path) == 8
