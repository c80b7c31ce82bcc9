"""Every suite by its name. Their modules are loaded on use, so that listing them costs nothing."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping

from lab.evaluation.suite import Options, Suite, SuiteError


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """Where a suite is made, and what it is, in a line."""

    module: str
    about: str


SUITES: Mapping[str, Entry] = {
    "smoke": Entry("lab.evaluation.smoke", "static fleets on two short traces, to try the command; a few seconds"),
    "tre": Entry("lab.suites.tre", "three models on eight GPUs, seven traces, twelve contenders; half an hour"),
    "tre-loads": Entry("lab.suites.tre_other_loads", "the same traces at a lighter and a heavier load; an hour"),
    "diurnal": Entry(
        "lab.suites.diurnal", "a prefill and decode service over a day, 11 scalers; a quarter of an hour of CPU"
    ),
}
"""A suite's module has a function `suite(options: Options) -> Suite`."""


def find_suite(name: str, options: Options) -> Suite:
    """A suite by its name. Raises `SuiteError` for a name that is none, and for options that it cannot take."""
    entry = SUITES.get(name)
    if entry is None:
        raise SuiteError(f"there is no suite {name!r}; there are {', '.join(sorted(SUITES))}")
    made = importlib.import_module(entry.module).suite(options)
    if not isinstance(made, Suite) or made.name != name:
        raise TypeError(f"{entry.module}.suite did not make the suite {name!r}")
    return made
