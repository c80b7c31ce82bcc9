"""Writes the stubs in trimtab/api from the files in protos/.

`python protos/generate.py` regenerates; `--check` exits 1 when the committed stubs differ from what the protos give.

protoc derives import paths from the folder of a proto file (`trimtab/actuator/v1` → `trimtab.actuator.v1`), while the
stubs live under `trimtab.api`: so they are written to a temporary folder and their absolute imports are rewritten.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
PLUGINS = Path(sys.executable).parent
API = PROTOS.parent / "trimtab" / "api"
_IMPORT = re.compile(r"\b(from|import) trimtab\.(common|collector|policy|scheduler|actuator|store)\b")
_REFERENCE = re.compile(r"(?<![\w.\"'/])trimtab\.(common|collector|policy|scheduler|actuator|store)\.v1\b")


def generate(target: Path) -> None:
    """Writes every stub, and the package files, to `target`."""
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("trimtab/**/*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        well_known = str(resources.files("grpc_tools") / "_proto")
        code = protoc.main(
            [
                "protoc",
                f"-I{PROTOS}",
                f"-I{well_known}",
                f"--python_out={scratch}",
                f"--grpc_python_out={scratch}",
                *(f"--plugin={name}={PLUGINS / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
                f"--mypy_out=quiet:{scratch}",
                f"--mypy_grpc_out=quiet:{scratch}",
                *files,
            ]
        )
        if code != 0:
            raise SystemExit(f"protoc failed with {code}")
        for stub in sorted(Path(scratch, "trimtab").rglob("*.py*")):
            relative = stub.relative_to(Path(scratch, "trimtab"))
            if "_pb2_grpc" in relative.name and "def add_" not in stub.read_text():
                continue  # a file without services gets an empty gRPC stub
            destination = target / relative
            destination.parent.mkdir(parents=True, exist_ok=True)
            destination.write_text(_rewrite(stub.read_text(), is_interface=stub.suffix == ".pyi"))
    for folder in [target, *(path for path in sorted(target.rglob("*")) if path.is_dir())]:
        name = ".".join(folder.relative_to(target).parts)
        docstring = (
            f"Stubs of trimtab.{name}." if name else "Stubs generated from protos/ by `make proto`. Not edited by hand."
        )
        (folder / "__init__.py").write_text(f'"""{docstring}"""\n')


def _rewrite(text: str, *, is_interface: bool) -> str:
    text = _IMPORT.sub(r"\1 trimtab.api.\2", text)
    if is_interface:
        text = _REFERENCE.sub(r"trimtab.api.\1.v1", text)
    return text


def _same(left: Path, right: Path) -> bool:
    def names(folder: Path) -> list[Path]:
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return sorted(name for name in found if "__pycache__" not in name.parts)

    return names(left) == names(right) and all(
        filecmp.cmp(left / name, right / name, shallow=False) for name in names(left)
    )


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 when the committed stubs are old")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch, "api")
        fresh.mkdir()
        generate(fresh)
        if check:
            if _same(fresh, API):
                return 0
            print("trimtab/api is not what protos/ gives: run `make proto` and commit", file=sys.stderr)
            return 1
        shutil.rmtree(API, ignore_errors=True)
        shutil.copytree(fresh, API)
    return 0


if __name__ == "__main__":
    sys.exit(main())
