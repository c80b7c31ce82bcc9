"""`python -m lab.calibration.ranges`: the loads between which each of TRE's models goes from health to trouble.

TRE judges its signal by "per-model fixed-capacity trace ranks that cover each model's transition from healthy to
degraded service", selected "within each model's operating range" (§VI-B). The suite's own loads are not those: they
are such that the static split over all models together keeps the SLO for a given share, and one model may be in health
in nearly every window while the others are lost. So every trace has two loads for each model here: those at which this
model's part of the split keeps the SLO for `TARGETS` of its requests, found by bisection, on average over training
seeds. `--write` puts them into `ranges.yaml`, in about two minutes of CPU; without it the table is printed alone.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from lab.suites.loads import TARGETS as SUITE_TARGETS
from lab.suites.loads import Load, packaged_loads, scale_for
from lab.suites.tre_setup import SLOS, STATIC_SPLIT, TRAINING_SEEDS, profiles
from lab.virtual.fixed.colocated import colocated
from simulator.traces.model import TraceRequest
from simulator.traces.probes import MODELS, PROBES, probe
from trimtab.config.yamlfile import YamlError, read_yaml_documents

RANGES_FILE = Path(__file__).parent / "ranges.yaml"
TARGETS = {name: SUITE_TARGETS[name] for name in ("light", "heavy")}
"""The share of a model's requests within the SLO, by the load's name."""
_TOLERANCE = 0.015
_DIGITS = 4

Ranges = Mapping[str, Mapping[str, Mapping[str, Load]]]
"""Loads by model, trace and name."""


@functools.cache
def packaged_ranges() -> Ranges:
    """The packaged figures."""
    return read_ranges(RANGES_FILE)


def read_ranges(path: Path) -> Ranges:
    """The figures of a file. Raises `YamlError`, with the file's name and what is wrong."""
    documents = read_yaml_documents(path)
    document = documents[0] if documents and isinstance(documents[0], Mapping) else {}
    try:
        return {
            model: {
                trace: {name: _load(document[model][trace][name], f"{model}, {trace}, {name}") for name in TARGETS}
                for trace in PROBES
            }
            for model in MODELS
        }
    except (KeyError, TypeError, ValueError) as error:
        raise YamlError(f"{path}: not what --write makes ({error}); write it anew with --write") from None


def _load(found: Mapping[str, object], place: str) -> Load:
    scale, kept = found["rate_scale"], found["attainment"]
    if not (isinstance(scale, float) and isinstance(kept, float) and scale > 0 and 0 <= kept <= 1):
        raise ValueError(f"{place}: {scale!r} and {kept!r} are no factor and share")
    return Load(scale, kept)


def requests_of(model: str, trace: str, *, seed: int, rate_scale: float) -> Iterator[TraceRequest]:
    """The requests of one model in a trace."""
    return (request for request in probe(trace, seed=seed, rate_scale=rate_scale) if request.service == model)


def attained(model: str, trace: str, rate_scale: float, seeds: Sequence[int] = TRAINING_SEEDS) -> float:
    """The share within the SLO of a model's requests on its part of the static split, on average over seeds."""
    profile, slo = profiles()[model], SLOS[model]
    shares = []
    for seed in seeds:
        records = colocated(profile, STATIC_SPLIT[model]).run(
            requests_of(model, trace, seed=seed, rate_scale=rate_scale)
        )
        shares.append(records.attainment(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s))
    return statistics.fmean(shares)


def found_range(attainment: Callable[[float], float], start: float) -> dict[str, Load]:
    """The load of every name, the lightest first; each factor is rounded as it is written, then measured.

    `attainment` is the share within the SLO at a factor. The search begins at `start`.
    """

    @functools.cache
    def at(scale: float) -> float:
        return attainment(round(scale, _DIGITS))

    found: dict[str, Load] = {}
    for name, target in TARGETS.items():
        scale, kept = scale_for(at, target, start=start, tolerance=_TOLERANCE)
        found[name] = Load(round(scale, _DIGITS), round(kept, _DIGITS))
        start = scale
    return found


def to_document(ranges: Ranges) -> dict[str, object]:
    """Plain data for YAML."""
    return {
        model: {
            trace: {
                name: {"rate_scale": load.rate_scale, "attainment": load.static_attainment}
                for name, load in loads.items()
            }
            for trace, loads in traces.items()
        }
        for model, traces in ranges.items()
    }


def _searched() -> Ranges:
    ranges: dict[str, dict[str, dict[str, Load]]] = {model: {} for model in MODELS}
    for trace in PROBES:
        start = packaged_loads().traces[trace]["light"].rate_scale
        for model in MODELS:
            found = found_range(functools.partial(attained, model, trace), start)
            said = (f"{name} {load.rate_scale:.3f} keeps {load.static_attainment:.3f}" for name, load in found.items())
            sys.stdout.write(f"{trace}, {model}: {', '.join(said)}\n")
            sys.stdout.flush()
            ranges[model][trace] = found
    return ranges


def main() -> int:
    """Find the loads, print them and write them on request; exit status 1 where no load does."""
    parser = argparse.ArgumentParser(description="each model's own loads of the traces, from health to trouble")
    parser.add_argument("--write", action="store_true", help="write the packaged file")
    arguments = parser.parse_args()
    try:
        found = _searched()
        if arguments.write:
            RANGES_FILE.write_text(yaml.safe_dump(to_document(found), sort_keys=False, width=120), encoding="utf-8")
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
