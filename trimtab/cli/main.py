"""The entry point: options that every command shares, and errors as one clear line with a non-zero exit."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

from trimtab import __version__, usage
from trimtab.cli import (
    calibrate,
    chaos,
    decisions,
    demo,
    evaluate,
    replay,
    resources,
    simulate,
    status,
    targets,
    topology,
    up,
)
from trimtab.cli.connect import CommandError, set_endpoints
from trimtab.cli.output import print_error, print_json

app = typer.Typer(
    name="trimtab",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def version_command(as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False) -> None:
    """Versions of Trimtab, Python and gRPC."""
    versions = {
        "trimtab": __version__,
        "python": sys.version.split()[0],
        "grpcio": metadata.version("grpcio"),
    }
    if as_json:
        print_json(versions)
    else:
        print(" ".join(f"{name} {version}" for name, version in versions.items()))


app.callback()(set_endpoints)
app.command("up")(up.up_command)
app.command("demo")(demo.demo_command)
app.command("chaos")(chaos.chaos_command)
app.command("calibrate")(calibrate.calibrate_command)
app.command("apply")(resources.apply_command)
app.command("get")(resources.get_command)
app.command("delete")(resources.delete_command)
app.command("pause")(resources.pause_command)
app.command("resume")(resources.resume_command)
app.command("status")(status.status_command)
app.command("decisions")(decisions.decisions_command)
app.command("explain")(decisions.explain_command)
app.command("targets")(targets.targets_command)
app.command("topology")(topology.topology_command)
app.command("replay")(replay.replay_command)
app.command("evaluate")(evaluate.evaluate_command)
app.add_typer(simulate.app, name="simulate")
app.command("version")(version_command)


def main() -> None:
    """Runs the command line; never shows a traceback for what the reader can mend."""
    try:
        status = usage.invoke(app, "trimtab")
    except CommandError as error:
        print_error(str(error))
        status = 1
    except usage.UsageError as error:
        print_error(str(error))
        status = usage.USAGE_STATUS
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    main()
