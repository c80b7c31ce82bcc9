"""How much load each trace of the TRE suite gets, and how that was found; the figures are in `tre_loads.yaml`.

A load is a factor on the request rates of `simulator.traces.probes`. Each trace has three: `main`, at which the static
split keeps the SLO for 0.8 of all requests, and two that are reported beside it, `light` (0.92) and `heavy` (0.6).
`python -m lab.suites.calibrate_loads --write` finds them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from lab.suites.capacity import TokenCost
from trimtab.config.yamlfile import YamlError, read_yaml_documents

LOADS_FILE = Path(__file__).parent / "tre_loads.yaml"
MAIN = "main"
TARGETS = {MAIN: 0.80, "light": 0.92, "heavy": 0.60}
"""SLO attainment of the static split, by the load's name."""
MAIN_RANGE = (0.75, 0.85)
_REL_TOLERANCE = 0.01
_MAX_STEPS = 24
_WIDER = 1.12
_LEAST_FACTOR, _LARGEST_FACTOR = 0.01, 100.0


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """A factor on a trace's rates, and what the static split attained at it on average over the training seeds."""

    rate_scale: float
    static_attainment: float


@dataclasses.dataclass(frozen=True, slots=True)
class Loads:
    """Everything that was found: loads by trace and name, and what tokens cost each model."""

    found_by: str
    traces: Mapping[str, Mapping[str, Load]]
    costs: Mapping[str, TokenCost]

    def to_document(self) -> dict[str, object]:
        """Plain data for YAML."""
        return {
            "found_by": self.found_by,
            "traces": {
                trace: {
                    name: {
                        "rate_scale": round(load.rate_scale, 4),
                        "static_attainment": round(load.static_attainment, 4),
                    }
                    for name, load in loads.items()
                }
                for trace, loads in self.traces.items()
            },
            "costs": {
                model: {
                    "prompt_token_s": float(f"{cost.prompt_token_s:.3g}"),
                    "output_token_s": float(f"{cost.output_token_s:.3g}"),
                }
                for model, cost in self.costs.items()
            },
        }


@functools.cache
def packaged_loads() -> Loads:
    """The packaged figures."""
    return read_loads(LOADS_FILE)


def read_loads(path: Path) -> Loads:
    """The figures of a file. Raises `YamlError`, with the file's name and what is wrong."""
    documents = read_yaml_documents(path)
    document = documents[0] if documents and isinstance(documents[0], Mapping) else {}
    try:
        return Loads(
            found_by=str(document["found_by"]),
            traces={
                str(trace): {
                    str(name): Load(_positive(load["rate_scale"]), float(load["static_attainment"]))
                    for name, load in loads.items()
                }
                for trace, loads in document["traces"].items()
            },
            costs={
                str(model): TokenCost(_positive(cost["prompt_token_s"]), _positive(cost["output_token_s"]))
                for model, cost in document["costs"].items()
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise YamlError(f"{path}: not the figures of calibrate_loads ({error}); write them anew with --write") from None


def _positive(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{value!r} must be a number above 0")
    return float(value)


def scale_for(
    attainment: Callable[[float], float], target: float, *, start: float = 1.0, tolerance: float = 0.01
) -> tuple[float, float]:
    """The factor at which `attainment` is `target`, and what it is there.

    `attainment` falls as the factor grows, but for noise. From `start` the factor is moved until the target is
    between two; then the next factor is interpolated over the logarithm. Ends within `tolerance` of the
    target, or when the bracket is narrow. Raises ValueError when no factor between 0.01 and 100 brackets the target.
    """
    low = high = start
    at_low = at_high = attainment(start)
    while at_low < target:
        low, high, at_high = low / _WIDER, low, at_low
        at_low = attainment(_within_reach(low, target))
    while at_high > target:
        high, low, at_low = high * _WIDER, high, at_high
        at_high = attainment(_within_reach(high, target))
    best = min(((low, at_low), (high, at_high)), key=lambda found: abs(found[1] - target))
    for _ in range(_MAX_STEPS):
        if abs(best[1] - target) <= tolerance or high <= low * (1 + _REL_TOLERANCE):
            break
        # Kept off the ends, so that a bent curve cannot hold the search at one of them.
        part = min(0.9, max(0.1, (at_low - target) / (at_low - at_high)))
        middle = low * (high / low) ** part
        at_middle = attainment(middle)
        best = min((best, (middle, at_middle)), key=lambda found: abs(found[1] - target))
        if at_middle > target:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    return best


def _within_reach(factor: float, target: float) -> float:
    if not _LEAST_FACTOR <= factor <= _LARGEST_FACTOR:
        raise ValueError(f"no load between {_LEAST_FACTOR} and {_LARGEST_FACTOR:g} times attains {target}")
    return factor
