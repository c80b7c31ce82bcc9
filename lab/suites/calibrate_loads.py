"""`python -m lab.suites.calibrate_loads`: find the loads at which the static split attains what it should.

For each trace the request rates are multiplied by a factor, found by bisection, until the static split of the TRE
set-up keeps the SLO for the wanted share of all requests, on average over the training seeds. Prints a table, and with
`--write` the packaged file. `--check` compares the packaged factors with what they attain, without searching.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from lab.suites.capacity import TokenCost, token_cost
from lab.suites.loads import LOADS_FILE, MAIN, MAIN_RANGE, TARGETS, Load, Loads, packaged_loads, scale_for
from lab.suites.static_fleets import run_static
from lab.suites.tre_setup import SLOS, STATIC_SPLIT, TRAINING_SEEDS, profiles
from simulator.traces.probes import MODELS, PROBES, probe
from trimtab.config.yamlfile import YamlError

FOUND_BY = "python -m lab.suites.calibrate_loads --write"

app = typer.Typer(add_completion=False, help=__doc__)
_log = Console(stderr=True, soft_wrap=True)


def attained(trace: str, rate_scale: float, seeds: Sequence[int] = TRAINING_SEEDS) -> float:
    """SLO attainment of the static split on a trace at a load, on average over seeds."""
    outcomes = (
        run_static(
            probe(trace, seed=seed, rate_scale=rate_scale), profiles=profiles(), slos=SLOS, replicas=STATIC_SPLIT
        )
        for seed in seeds
    )
    return statistics.fmean(outcome.attainment for outcome in outcomes)


def loads_of(trace: str, starts: Mapping[str, float]) -> dict[str, Load]:
    """Every load of one trace. A search begins at its name's factor in `starts`, or where the one before has ended."""
    known = functools.cache(functools.partial(attained, trace))
    found: dict[str, Load] = {}
    last = 1.0
    for name, target in TARGETS.items():
        found[name] = Load(*scale_for(known, target, start=starts.get(name, last)))
        last = found[name].rate_scale
        _log.print(f"{trace}, {name}: {last:.3f} times attains {found[name].static_attainment:.3f}", highlight=False)
    return found


def _searched() -> Loads:
    """Every trace's loads, from the packaged ones where there are any."""
    before = packaged_loads().traces if LOADS_FILE.exists() else {}
    starts = {trace: {name: load.rate_scale for name, load in before.get(trace, {}).items()} for trace in PROBES}
    return Loads(FOUND_BY, {trace: loads_of(trace, starts[trace]) for trace in PROBES}, costs())


def costs() -> dict[str, TokenCost]:
    """What tokens cost each model."""
    found = profiles()
    return {model: token_cost(found[model], SLOS[model]) for model in MODELS}


@app.command()
def main(
    write: Annotated[bool, typer.Option("--write", help="Write the packaged file.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only run the packaged main loads.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Find the loads of the TRE suite's traces."""
    try:
        found = _checked() if check else _searched()
    except (YamlError, ValueError, OSError) as error:
        _log.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    if write and not check:
        LOADS_FILE.write_text(yaml.safe_dump(found.to_document(), sort_keys=False, width=120), encoding="utf-8")
    if as_json:
        sys.stdout.write(json.dumps(found.to_document()) + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(_table(found))
    low, high = MAIN_RANGE
    outside = [name for name, loads in found.traces.items() if not low <= loads[MAIN].static_attainment <= high]
    if outside:
        _log.print(f"the static split is not within {low:g} and {high:g} on {', '.join(outside)}")
        raise typer.Exit(1)


def _checked() -> Loads:
    packaged = packaged_loads()
    traces = {
        trace: {MAIN: Load(loads[MAIN].rate_scale, attained(trace, loads[MAIN].rate_scale))}
        for trace, loads in packaged.traces.items()
    }
    return Loads(packaged.found_by, traces, costs())


def _table(found: Loads) -> Table:
    names = list(next(iter(found.traces.values())))
    table = Table(title="factor on the trace's rates: SLO attainment of the static split", title_justify="left")
    table.add_column("trace")
    for name in names:
        table.add_column(f"{name} ({TARGETS[name]:g})", justify="right")
    for trace, loads in found.traces.items():
        table.add_row(trace, *(f"{load.rate_scale:.3f}: {load.static_attainment:.3f}" for load in loads.values()))
    table.caption = "; ".join(
        f"{model}: {cost.prompt_token_s * 1e6:.0f} and {cost.output_token_s * 1e6:.0f} µs of a replica for a token in "
        "and out"
        for model, cost in found.costs.items()
    )
    return table


if __name__ == "__main__":
    app()
