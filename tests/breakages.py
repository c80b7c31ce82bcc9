"""Puts each fault of breakages.yaml into a copy of the tree and demands that the tests fail there.

    python -m tests.breakages             each with the tests that it names
    python -m tests.breakages --all       each with all of `make test`, up to the first failure
    python -m tests.breakages floor       those with this word in their name

Exit status 1 when the tests pass with a fault in place.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "breakages.yaml"
PRODUCT = ("trimtab", "gateway", "services", "simulator", "lab")
TESTS_FAILED = 1
"""pytest's status for that; errors of usage or collection have others."""


@dataclass(frozen=True)
class Breakage:
    """One fault: ``text`` of the product becomes ``replacement``, and each of ``tests`` fails."""

    name: str
    text: str
    replacement: str
    tests: tuple[str, ...]


def breakages() -> list[Breakage]:
    """The committed list."""
    return [
        Breakage(one["name"], one["text"].strip(), one["replacement"].strip(), tuple(one["tests"]))
        for one in yaml.safe_load(LIST.read_text(encoding="utf-8"))
    ]


def places(text: str, root: Path = ROOT) -> list[Path]:
    """The product's files with ``text``, one for each time."""
    files = (path for folder in PRODUCT for path in sorted((root / folder).rglob("*.py")))
    return [path for path in files for _ in range(path.read_text(encoding="utf-8").count(text))]


def broken_tree(breakage: Breakage, folder: Path) -> Path:
    """A copy of the tree in ``folder`` with the fault in it. Raises ValueError unless its text stands there once."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    found = places(breakage.text, folder)
    if len(found) != 1:
        raise ValueError(f"{breakage.name}: its text stands {len(found)} times in the product, must be once")
    text = found[0].read_text(encoding="utf-8")
    found[0].write_text(text.replace(breakage.text, breakage.replacement), encoding="utf-8")
    return found[0].relative_to(folder)


def notices(breakage: Breakage, options: Sequence[str], selected: Sequence[str]) -> str:
    """Runs ``selected`` tests, all for none, with the fault; what is wrong about their result, empty for nothing."""
    with tempfile.TemporaryDirectory(prefix="trimtab-breakage-") as name:
        folder = Path(name)
        place = broken_tree(breakage, folder)
        # Before the paths of an editable install, in child processes too.
        environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'services'}"}
        # CI's reports are of runs that pass.
        environment.pop("PYTEST_ADDOPTS", None)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
        done = subprocess.run(
            [*command, *(f"tests/{test}" for test in selected)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode != TESTS_FAILED:
        return f"{place}: pytest ends with {done.returncode}, must be {TESTS_FAILED}\n{done.stdout[-2000:]}"
    silent = [test for test in selected if not any(test in line for line in failed)]
    return f"{place}: these pass with it: {', '.join(silent)}" if silent else ""


def main() -> int:
    """Prints one line for each breakage."""
    parser = argparse.ArgumentParser(prog="python -m tests.breakages", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only breakages with one of these words in their name")
    parser.add_argument("--all", action="store_true", help="run all of `make test` for each")
    given = parser.parse_args()
    chosen = [one for one in breakages() if not given.words or any(word in one.name for word in given.words)]
    unnoticed = 0
    for breakage in chosen:
        started = time.monotonic()
        options = ["-n", "auto", "--dist", "worksteal", "-x"] if given.all else []
        wrong = notices(breakage, options, () if given.all else breakage.tests)
        unnoticed += bool(wrong)
        said = f"NOT NOTICED: {wrong}" if wrong else "noticed"
        print(f"{breakage.name}: {said} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} noticed")
    return 1 if unnoticed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
