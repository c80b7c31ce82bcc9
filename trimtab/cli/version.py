"""`trimtab version`: imports little, so that it shows how long the command itself takes to start."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import Annotated

import typer

from trimtab import __version__


def version_command(as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False) -> None:
    """Versions of Trimtab, Python and gRPC."""
    versions = {"trimtab": __version__, "python": sys.version.split()[0], "grpcio": metadata.version("grpcio")}
    if as_json:
        print(json.dumps(versions, indent=2))
    else:
        print(" ".join(f"{name} {version}" for name, version in versions.items()))
