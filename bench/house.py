"""Whether the layers hold, and what a plain install and a client's start cost: ``python -m bench.house --json``.

`base_imports_up` counts imports of simulator and lab in the base, the services and the gateway, those inside functions
too. `twins` counts pairs of production and lab that do not both call the core functions that they share
(`bench/_twins.py`). `production_install_ratio` is the size of the files that a plain install of this commit brings,
dependencies and all, over the same for a commit before there were extras; one command installs both, one after the
other, into folders that are removed again. The figures are kept in the user's cache. `client_start_ratio` is the CPU
time of `trimtab version` over that of a Python that imports grpc: medians of runs that take turns.
"""

import argparse
import ast
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench._report import machine, print_bars, put_out
from bench._twins import twins

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "06fe156"
"""The last commit whose plain install brought everything."""
LOWER = ("trimtab", "services", "gateway")
UPPER = ("simulator", "lab")
STARTS = 15
INSTALL_RATIO = 0.65
START_RATIO = 4.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One figure with its bar: it is met when the value is at most that."""

    value: float | None
    """None: it could not be measured, which misses the bar."""
    bar: float
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the bar is met."""
        return self.value is not None and self.value <= self.bar


# Imports


def imports_up(root: Path) -> list[str]:
    """`file:line: module` of every import of an upper package in a lower one."""
    return [
        f"{path.relative_to(root)}:{line}: {module}"
        for folder in LOWER
        for path in sorted((root / folder).rglob("*.py"))
        for line, module in _imports(ast.parse(path.read_bytes(), filename=str(path)))
        if module.partition(".")[0] in UPPER
    ]


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of all imports, at any place in the file; `import_module` of a written-out name is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def base_imports_up() -> Measured:
    """Imports of the base, the services and the gateway into simulator or lab."""
    found = imports_up(ROOT)
    return Measured(value=float(len(found)), bar=0.0, details={"imports": found})


def count_twins() -> Measured:
    """Pairs of production and lab that do the same by code of their own."""
    found = twins()
    return Measured(value=float(len(found)), bar=0.0, details={"pairs": found})


# Installs


class NotMeasured(Exception):
    """What is compared with is not there; the message is the reason."""


def install_bytes(commit: str, *, root: Path = ROOT) -> int:
    """Bytes of all files of a plain install of a commit. Raises `NotMeasured`."""
    with tempfile.TemporaryDirectory(prefix="trimtab-house-") as name:
        source, target = Path(name) / "source", Path(name) / "installed"
        _export(commit, source, root)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "--target", str(target), str(source)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise NotMeasured(f"pip install of {commit} failed: {last}")
        return size_of(target)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, links not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


def resolve(commit: str, *, root: Path = ROOT) -> str:
    """The full name of a commit. Raises `NotMeasured` where the history here lacks it."""
    command = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotMeasured(f"git: {error.strerror}") from None
    if done.returncode != 0:
        raise NotMeasured(f"the history here has no commit {commit}")
    return done.stdout.strip()


def _export(commit: str, folder: Path, root: Path) -> None:
    with tempfile.TemporaryFile() as archive:
        done = subprocess.run(["git", "archive", commit], cwd=root, stdout=archive, check=False)
        if done.returncode != 0:
            raise NotMeasured(f"git archive of {commit} failed")
        archive.seek(0)
        with tarfile.open(fileobj=archive) as files:
            files.extractall(folder, filter="data")


def production_install_ratio(baseline: str, commit: str, cache: Path) -> Measured:
    """The plain install of `commit` over that of `baseline`."""
    try:
        before, after = resolve(baseline), resolve(commit)
        figures = _cached(
            cache / f"install-{before[:12]}-{after[:12]}-{sys.implementation.cache_tag}.json",
            lambda: {"baseline_bytes": install_bytes(before), "bytes": install_bytes(after)},
        )
    except NotMeasured as reason:
        return Measured(value=None, bar=INSTALL_RATIO, details={"not_measured": str(reason)})
    ratio = figures["bytes"] / figures["baseline_bytes"]
    return Measured(value=ratio, bar=INSTALL_RATIO, details={"baseline": before, "commit": after, **figures})


def _cached(path: Path, measure: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Figures of an earlier run of the same two commits, or new ones."""
    if path.is_file():
        kept: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
        return kept
    figures = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures), encoding="utf-8")
    return figures


def cache_folder() -> Path:
    """Outside the checkout."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimtab" / "bench-house"


# Start


def client_start_ratio(starts: int) -> Measured:
    """`trimtab version` over `import grpc`, in CPU seconds."""
    commands = {
        "version": [str(Path(sys.executable).with_name("trimtab")), "version"],
        "grpc": [sys.executable, "-c", "import grpc"],
    }
    cpu_s: dict[str, list[float]] = {name: [] for name in commands}
    wall_s: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(starts + 1):
        for name, command in commands.items():
            cpu, wall = _run(command)
            # The first turn fills the file cache and writes bytecode.
            if turn:
                cpu_s[name].append(cpu)
                wall_s[name].append(wall)
    medians = {
        f"{name}_{kind}_s": round(statistics.median(seconds[name]), 4)
        for kind, seconds in (("cpu", cpu_s), ("wall", wall_s))
        for name in commands
    }
    return Measured(
        value=statistics.median(cpu_s["version"]) / statistics.median(cpu_s["grpc"]),
        bar=START_RATIO,
        details={"starts": starts, **medians},
    )


def _run(command: Sequence[str]) -> tuple[float, float]:
    """(CPU, wall) seconds of a command."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after, ended_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended_s - began_s


def run(measures: Mapping[str, Callable[[], Measured]], inputs: Mapping[str, object]) -> dict[str, object]:
    """Every figure as one document."""
    found = {name: measure() for name, measure in measures.items()}
    return {
        "bench": "house",
        "machine": machine(),
        "inputs": dict(inputs),
        "results": {name: dict(one.details) for name, one in found.items()},
        "bars": [
            {
                "name": name,
                "value": "not measured" if one.value is None else round(one.value, 4),
                "bar": one.bar,
                "ok": one.ok,
            }
            for name, one in found.items()
        ],
    }


def _show(report: Mapping[str, object]) -> None:
    results = report["results"]
    for name, details in results.items() if isinstance(results, dict) else ():
        for key, value in details.items():
            print(f"{name}: {key} {value}")
    print_bars(report)


def main() -> int:
    """Print the figures; exit status 1 when a bar is missed or a figure could not be measured."""
    parser = argparse.ArgumentParser(description="layers, twins, size of a plain install, start of a client")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--baseline", default=BASELINE, help=f"commit that installs are compared with ({BASELINE})")
    parser.add_argument("--commit", default="HEAD", help="commit whose install is measured (HEAD)")
    parser.add_argument("--starts", type=int, default=STARTS, help=f"timed starts of each command ({STARTS})")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="folder for the sizes of installs")
    arguments = parser.parse_args()
    measures: dict[str, Callable[[], Measured]] = {
        "base_imports_up": base_imports_up,
        "twins": count_twins,
        "production_install_ratio": lambda: production_install_ratio(
            arguments.baseline, arguments.commit, arguments.cache
        ),
        "client_start_ratio": lambda: client_start_ratio(arguments.starts),
    }
    inputs = {"baseline": arguments.baseline, "commit": arguments.commit, "starts": arguments.starts}
    return put_out(run(measures, inputs), as_json=arguments.json, show=_show)


if __name__ == "__main__":
    sys.exit(main())
