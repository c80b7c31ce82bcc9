"""Pairs of production and lab: what counts as a call, and what is said of a pair that has come apart."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench._twins import PAIRS, ROOT, Pair, calls, twins

PAIR = Pair(
    name="wishes", production=("a.py", "b.py"), lab=("lab.py",), shared=("core.wish.make",), gone=(("lab.py", "_make"),)
)
CALLS = "from core.wish import make\nmake()\n"


def written(root: Path, **modules: str) -> Path:
    for name, text in modules.items():
        (root / f"{name}.py").write_text(text)
    return root


@pytest.mark.parametrize(
    "text",
    [
        CALLS,
        "from core.wish import make as m\nx = [m(1)]\n",
        "import core.wish\ncore.wish.make()\n",
        "import core.wish as w\nw.make()\n",
        "from core import wish\nlist(map(wish.make, []))\n",
        "from core.wish import make\nasync def f():\n    await g(key=make)\n",
    ],
)
def test_a_call_is_found_however_the_function_is_imported(text: str) -> None:
    assert "core.wish.make" in calls(ast.parse(text))


@pytest.mark.parametrize(
    "text", ["from core.wish import make\n", "def make(): ...\nmake()\n", "from other import make\nmake()\n"]
)
def test_an_import_alone_is_no_call_nor_is_a_function_of_that_name_from_elsewhere(text: str) -> None:
    assert "core.wish.make" not in calls(ast.parse(text))


def test_one_module_of_each_side_has_to_call_each_function(tmp_path: Path) -> None:
    assert twins([PAIR], written(tmp_path, a="", b=CALLS, lab=CALLS)) == []
    assert twins([PAIR], written(tmp_path, b="")) == ["wishes: a.py and b.py: no call of core.wish.make"]


def test_a_function_that_was_written_twice_must_not_come_back(tmp_path: Path) -> None:
    root = written(tmp_path, a=CALLS, b="", lab=CALLS + "class C:\n    def _make(self): ...\n")
    assert twins([PAIR], root) == ["wishes: lab.py has _make again"]


def test_a_module_that_is_not_there_is_no_proof(tmp_path: Path) -> None:
    assert twins([PAIR], written(tmp_path, a=CALLS, b="")) == [
        "wishes: lab.py is not there; lab.py: no call of core.wish.make"
    ]


def test_every_pair_names_modules_and_functions_that_are_there() -> None:
    for pair in PAIRS:
        assert all((ROOT / name).is_file() for name in (*pair.production, *pair.lab)), pair.name
        for name in pair.shared:
            module, _, function = name.rpartition(".")
            places = [folder / f"{module.replace('.', '/')}.py" for folder in (ROOT, ROOT / "services")]
            source = next(place for place in places if place.is_file()).read_text()
            assert f"\ndef {function}(" in source, f"{pair.name}: {name}"
