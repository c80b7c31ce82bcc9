"""What benches print: one JSON document, or a line a bar; and the exit status that follows from the bars."""

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping


def machine() -> dict[str, object]:
    """Where it ran."""
    return {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}


def main_of(run: Callable[[], Mapping[str, object]], description: str) -> int:
    """The command of a bench without options of its own; the exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return put_out(run(), as_json=parser.parse_args().json)


def print_bars(report: Mapping[str, object]) -> None:
    """A line a bar with its figures as they are, below tables."""
    bars = report["bars"]
    for bar in bars if isinstance(bars, list) else ():
        print(f"{bar['name']}: {bar['value']} (bar {bar['bar']}) {'ok' if bar['ok'] else 'MISSED'}")


def put_out(
    report: Mapping[str, object],
    *,
    as_json: bool,
    show: Callable[[Mapping[str, object]], None] | None = None,
) -> int:
    """Print a report, by `show` where it is not to be JSON; 1 when a bar is missed, else 0.

    Raises TypeError for a report without bars.
    """
    bars = report["bars"]
    if not isinstance(bars, list):
        raise TypeError("a report has a list of bars")
    if as_json:
        print(json.dumps(report, indent=2))
    elif show is not None:
        show(report)
    else:
        for bar in bars:
            print(f"{bar['name']}: {bar['value']:,.3f} (bar {bar['bar']:g}) {'ok' if bar['ok'] else 'MISSED'}")
    return 0 if all(bar["ok"] for bar in bars) else 1
