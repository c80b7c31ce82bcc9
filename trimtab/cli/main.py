"""The entry point: options that every command shares, and errors as one clear line with a non-zero exit."""

from __future__ import annotations

import sys

import typer

from trimtab import cli_errors
from trimtab.cli.endpoints import set_endpoints
from trimtab.cli.loading import LazyGroup


class _Commands(LazyGroup):
    own = {  # noqa: RUF012 - a table
        "up": "trimtab.cli.up:up_command",
        "apply": "trimtab.cli.resources:apply_command",
        "get": "trimtab.cli.resources:get_command",
        "delete": "trimtab.cli.resources:delete_command",
        "pause": "trimtab.cli.resources:pause_command",
        "resume": "trimtab.cli.resources:resume_command",
        "status": "trimtab.cli.status:status_command",
        "decisions": "trimtab.cli.decisions:decisions_command",
        "explain": "trimtab.cli.decisions:explain_command",
        "targets": "trimtab.cli.targets:targets_command",
        "topology": "trimtab.cli.topology:topology_command",
        "version": "trimtab.cli.version:version_command",
    }


app = typer.Typer(
    name="trimtab",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.callback()(set_endpoints)


def main() -> None:
    """Runs the command line; never shows a traceback for what the reader can mend."""
    try:
        status = cli_errors.invoke(app, "trimtab")
    except cli_errors.CommandError as error:
        _print_error(error)
        status = cli_errors.FAILED_STATUS
    except cli_errors.UsageError as error:
        _print_error(error)
        status = cli_errors.USAGE_STATUS
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    sys.exit(status)


def _print_error(error: Exception) -> None:
    # Rich takes longer to load than a command that does without.
    from trimtab.cli.output import print_error

    print_error(str(error))


if __name__ == "__main__":
    main()
