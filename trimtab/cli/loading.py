"""Commands that are loaded when they are called, so that one does not wait for what another imports.

A command is named by the module and the attribute that hold it, as an entry point names it: a function, or a
`typer.Typer` with commands of its own. Its line in the help is the first one of that function's docstring, read from
the source.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from trimtab.cli.extras import missing
from trimtab.cli_errors import CommandError

ENTRY_POINTS = "trimtab.commands"
"""The entry-point group in which distributions register commands: name → `module:function`."""


class LazyCommand(TyperCommand):
    """A placeholder for a command, which is imported when it is called."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name=name, callback=None, params=[])
        self.target = target

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the command itself, which this loads. Raises CommandError where it cannot be loaded."""
        return self._load().make_context(info_name, args, parent=parent, **extra)

    def _load(self) -> Any:
        module, _, attribute = self.target.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name is None:
                raise
            raise CommandError(missing(error.name, what=f"`trimtab {self.name}`")) from None
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(self.name)(found)
        return typer.main.get_command(app)

    def read_summary(self) -> None:
        """Sets the line for the help, without loading the command; none where its package is not installed."""
        module, _, attribute = self.target.partition(":")
        self.help = _summary(module, attribute)


class LazyGroup(TyperGroup):
    """Commands of the base, named by a subclass, and those that distributions register as entry points."""

    own: Mapping[str, str] = {}
    """Name → `module:attribute`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._registered = False
        for name, target in self.own.items():
            self.add_command(LazyCommand(name, target))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name; entry points are looked through for one that the base does not have."""
        if cmd_name not in self.commands:
            self._register()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names: those of the base in their order, then the others."""
        self._register()
        return super().list_commands(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help, with a line a command."""
        for name in self.list_commands(ctx):
            command = self.commands[name]
            if isinstance(command, LazyCommand):
                command.read_summary()
        super().format_help(ctx, formatter)

    def _register(self) -> None:
        if self._registered:
            return
        self._registered = True
        for point in sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
            if point.name not in self.commands:
                self.add_command(LazyCommand(point.name, point.value))


def _summary(module: str, attribute: str) -> str:
    """The first line of a docstring: that of the function, or of the module for anything else."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return "(not installed)"
    tree = ast.parse(Path(spec.origin).read_bytes())
    found = next(
        (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == attribute),
        tree,
    )
    return (ast.get_docstring(found) or "").partition("\n")[0]
