"""Errors of command lines, each shown as one line: typer's own way is a box of five.

`CommandError` is raised by commands, `UsageError` for a command line that is wrong. `run` is the whole program of a
`python -m` command.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn, cast

import typer

FAILED_STATUS = 1
USAGE_STATUS = 2
# Typer brings click along under names of its own; what a command line can be wrong in derives from this class of it.
_ClickError = cast("type[Exception]", typer.BadParameter.__mro__[2])


class CommandError(Exception):
    """A command failed; the message is one line for the terminal. Exit status 1."""


class UsageError(Exception):
    """An option, an argument or a command that there is not, lacks or has a bad value; the message is one line."""


def invoke(app: typer.Typer, name: str) -> int:
    """Runs a command line as the program `name`; the exit status. Raises UsageError, and what commands raise."""
    try:
        status: object = app(prog_name=name, standalone_mode=False)
    except _ClickError as error:
        _tell(error, name)
    return status if isinstance(status, int) else 0


def run(app: typer.Typer, name: str) -> NoReturn:
    """`invoke` as a whole program: ends the process, with one line on standard error for a mistake."""
    try:
        status = invoke(app, name)
    except (UsageError, CommandError) as error:
        sys.stderr.write(f"{name}: {error}\n")
        status = FAILED_STATUS if isinstance(error, CommandError) else USAGE_STATUS
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    sys.exit(status)


def _tell(error: Any, name: str) -> NoReturn:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(USAGE_STATUS)
    text = " ".join(error.format_message().split()).removesuffix(".")
    path = name if context is None else context.command_path
    raise UsageError(f"{text[:1].lower()}{text[1:]} (see `{path} --help`)") from None
