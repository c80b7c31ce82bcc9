"""One contender of the TRE suite on one trace at one load: from names to a `RunResult`."""

from __future__ import annotations

from lab.baselines.tuning import Setting
from lab.suites.loads import MAIN, Loads, packaged_loads
from lab.suites.tre_policies import CONTENDERS, Contender, setup_of
from lab.suites.tre_setup import DURATION_S
from lab.virtual.pool_run import run_pool
from lab.virtual.result import RunResult
from simulator.traces.model import TraceError
from simulator.traces.probes import probe

LOAD_MARK = "@"
"""`alternating` is a trace at its main load, `alternating@heavy` at another."""


def rate_scale(trace: str, loads: Loads) -> tuple[str, float]:
    """The probe of a trace of the suite and the factor on its rates. Raises `TraceError`."""
    name, _, load = trace.partition(LOAD_MARK)
    try:
        return name, loads.traces[name][load or MAIN].rate_scale
    except KeyError:
        raise TraceError(f"no load is packaged for {trace!r}; find it with calibrate_loads --write") from None


def run_contender(
    contender: Contender, setting: Setting, *, trace: str, seed: int, duration_s: float = DURATION_S
) -> RunResult:
    """One run. A setting that is impossible raises ValueError."""
    loads = packaged_loads()
    name, scale = rate_scale(trace, loads)
    requests = list(probe(name, seed=seed, duration_s=duration_s, rate_scale=scale))
    return run_pool(
        setup_of(contender, setting, loads),
        requests,
        contender.controller(requests, loads, setting),
        policy=contender.name,
        trace=trace,
        seed=seed,
        duration_s=duration_s,
    )


def run_named(policy: str, *, trace: str, seed: int, duration_s: float = DURATION_S) -> RunResult:
    """A contender with the setting that it has."""
    contender = CONTENDERS[policy]
    return run_contender(contender, contender.setting, trace=trace, seed=seed, duration_s=duration_s)
