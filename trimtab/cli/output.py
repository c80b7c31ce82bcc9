"""What commands print: tables for people, one JSON document for machines."""

from __future__ import annotations

import json
import sys

from rich.console import Console

# A pipe has no width of its own: tables stay readable in a log.
console = Console() if sys.stdout.isatty() else Console(width=160)
errors = Console(stderr=True)
ONE_LINE_COLUMNS = 110
"""In narrower terminals a record of a table takes lines of its own."""


def print_error(text: str) -> None:
    """Print one line on standard error: the form of every failure of a command."""
    errors.print(f"trimtab: {text}", style="red", markup=False, highlight=False, soft_wrap=True)


def print_notice(text: str) -> None:
    """One line on standard error, of something that happened and stops nothing."""
    errors.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def print_json(document: object) -> None:
    """One JSON document on standard output, without colours or wrapping."""
    print(json.dumps(document, indent=2, ensure_ascii=False))
