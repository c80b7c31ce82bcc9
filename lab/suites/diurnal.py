"""`trimtab evaluate diurnal`: policies that scale a service of prefill and decode replicas over a day, compared.

All contenders run on the identical runtime: the same pre-scheduler, actuator, start-up times and gateway. Targets come
from one pressure test; baselines whose signal differs by role get a target for each role, so that none is handicapped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab.baselines.aibrix import Kpa
from lab.baselines.dynamo_load import DynamoLoad
from lab.baselines.dynamo_sla import DynamoSla, Forecast
from lab.baselines.hpa import Hpa, HpaMetric
from lab.baselines.interface import Desired, EachRole, FleetView, RoleKey, Signal, started
from lab.baselines.oracle import Oracle, demand_of
from lab.baselines.static import Static
from lab.baselines.tuning import Setting
from lab.evaluation.bars import Bar, at_least, at_most
from lab.evaluation.study import Evaluation
from lab.evaluation.suite import Options, Suite, SuiteError, Tuning
from lab.evaluation.summaries import Case, RunSummary
from lab.evaluation.tuning import TunedPolicy, read_tuned
from lab.suites import diurnal_setup as day
from lab.virtual.fixed.ratio_sweep import SERVICE_A
from lab.virtual.result import RunResult
from lab.virtual.scaled_control import ProportionalController, ScaledController, ScaledCounts
from lab.virtual.scaled_run import run_scaled
from simulator.traces.diurnal import HOURS
from simulator.traces.model import TraceRequest
from trimtab.domain.vocabulary import Role

Tick = Callable[[FleetView], Desired]
PREFILL, DECODE = RoleKey(day.NAME, Role.PREFILL), RoleKey(day.NAME, Role.DECODE)
DOWN_WINDOW_S = 60.0
"""How long baselines look back before they scale in, as Trimtab does: their defaults of minutes are for real days."""
START_UP_S = 60.0
"""About the time that a replica takes to start."""
MIN_DURATION_S = 300.0
TUNED_FILE = Path(__file__).parent / "diurnal_tuned.yaml"
FINALISTS = 2
SAVED_AGAINST_PEAK = 0.2
ATTAINED = 0.95


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One of those compared. `start` are its thresholds before tuning, `space` what they are tuned in."""

    about: str
    make: Callable[[Setting, Sequence[TraceRequest]], ScaledController]
    first_units: Callable[[], int]
    start: Setting = dataclasses.field(default_factory=dict)
    space: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)


@functools.cache
def tuned_settings() -> Mapping[str, TunedPolicy]:
    """What `trimtab evaluate diurnal --tune POLICY --write` has found, by contender."""
    return read_tuned(TUNED_FILE)


def setting_of(policy: str) -> Setting:
    """A contender's thresholds: as tuned where it was."""
    contender, found = CONTENDERS[policy], tuned_settings().get(policy)
    return contender.start if found is None or not contender.space else found.setting


def described(policy: str) -> str:
    """What a contender is, and where its thresholds are from."""
    contender, found = CONTENDERS[policy], tuned_settings().get(policy)
    if not contender.space:
        return contender.about
    return f"{contender.about}; " + ("not tuned" if found is None else f"tuned on {len(found.seeds)} seeds")


def by_role(ticks: Mapping[RoleKey, Tick]) -> Tick:
    """A scaler for each role, none of which sees the others."""

    def tick(view: FleetView) -> Desired:
        wanted: dict[RoleKey, int] = {}
        for role in view.roles:
            wanted.update(ticks[role.key](dataclasses.replace(view, roles=(role,))))
        return wanted

    return tick


def _at_midnight() -> int:
    return day.units_for(day.peak_rps() * HOURS[0] / day.PEAK)


def _counts(units: int) -> tuple[tuple[Role, int], ...]:
    return ((Role.PREFILL, units * day.UNIT.prefill), (Role.DECODE, units * day.UNIT.decode))


def _baseline(ticks: Callable[[Setting], Tick]) -> Callable[[Setting, Sequence[TraceRequest]], ScaledController]:
    return lambda setting, trace: ScaledCounts(day.service_policy(), ticks(setting), _counts(_at_midnight()))


def _fixed(units: Callable[[], int]) -> Callable[[Setting, Sequence[TraceRequest]], ScaledController]:
    return lambda setting, trace: ScaledCounts(day.service_policy(), started(Static()), _counts(units()))


def _hpa(signal: Signal, target: float) -> Tick:
    return started(EachRole(Hpa(metrics=(HpaMetric(signal=signal, target=target),), down_window_s=DOWN_WINDOW_S)))


def _hpa_gpu(setting: Setting) -> Tick:
    return _hpa(Signal.GPU_UTILIZATION, setting["target"])


def _hpa_custom(setting: Setting) -> Tick:
    found = day.pressure_test()
    load = setting["load"] / day.TARGET_LOAD
    return by_role(
        {
            PREFILL: _hpa(Signal.GPU_UTILIZATION, min(0.95, found.gpu_utilisation * load)),
            DECODE: _hpa(Signal.RUNNING, found.decode_requests * load),
        }
    )


def _kpa(setting: Setting) -> Tick:
    found = day.pressure_test()
    load = setting["load"] / day.TARGET_LOAD
    targets = {PREFILL: found.prefill_requests * load, DECODE: found.decode_requests * load}
    return by_role(
        {
            key: started(EachRole(Kpa(target=target, down_cooldown_s=setting["down_cooldown_s"])))
            for key, target in targets.items()
        }
    )


def _dynamo(setting: Setting) -> Tick:
    names = ("kv_up", "kv_down", "queue_up", "queue_down", "period_s")
    return started(EachRole(DynamoLoad(**{name: setting[name] for name in names})))


def _dynamo_sla(setting: Setting) -> Tick:
    planner = DynamoSla(
        prefill=day.prefill_profile(),
        decode=day.decode_profile(),
        itl_s=day.SLO.tpot_s,
        forecast=Forecast.KALMAN if setting["kalman"] else Forecast.CONSTANT,
        period_s=setting["period_s"],
    )
    return started(EachRole(planner))


def _periodic(setting: Setting) -> Tick:
    """A timetable: units for the highest rate that the day's curve has from now until `ahead_s` later."""
    first_s: list[float] = []

    def tick(view: FleetView) -> Desired:
        first_s.extend([] if first_s else [view.now_s])
        at_s = view.now_s - first_s[0]
        highest_rps = max(day.rate_rps(at_s), day.rate_rps(at_s + setting["ahead_s"]))
        units = day.units_for(highest_rps * day.TARGET_LOAD / setting["load"])
        return {RoleKey(day.NAME, role): count for role, count in _counts(units)}

    return tick


def _oracle(setting: Setting, trace: Sequence[TraceRequest]) -> ScaledController:
    """Knows how many tokens come within its horizon, which is as long as a replica takes to start, and a little."""
    unit_rps = day.pressure_test().unit_rps
    per_prompt_token_s = day.UNIT.prefill / unit_rps / SERVICE_A.prompt_tokens
    per_output_token_s = day.UNIT.decode / unit_rps / SERVICE_A.output_tokens
    demand = demand_of(
        trace,
        {
            PREFILL: lambda one: one.prompt_tokens * per_prompt_token_s,
            DECODE: lambda one: one.output_tokens * per_output_token_s,
        },
        window_s=setting["window_s"],
    )
    tick = started(Oracle(demand=demand, horizon_s=setting["horizon_s"], load=setting["load"]))
    first_s: list[float] = []

    def on_trace_s(view: FleetView) -> Desired:
        first_s.extend([] if first_s else [view.now_s])
        return tick(dataclasses.replace(view, now_s=view.now_s - first_s[0]))

    return ScaledCounts(day.service_policy(), on_trace_s, _counts(_at_midnight()))


def _trimtab(brake: bool) -> Callable[[Setting, Sequence[TraceRequest]], ScaledController]:
    return lambda setting, trace: ProportionalController(day.service_policy(load=setting["load"], brake=brake))


def _peak_units() -> int:
    return day.units_for(day.peak_rps())


def _mean_units() -> int:
    return day.units_for(day.peak_rps() / day.PEAK)


_LOADS = (0.5, 0.6, 0.7, 0.8, 0.9)
CONTENDERS: Mapping[str, Contender] = {
    "static-peak": Contender(about="units for the day's peak", make=_fixed(_peak_units), first_units=_peak_units),
    "static-mean": Contender(about="units for the day's mean", make=_fixed(_mean_units), first_units=_mean_units),
    "hpa-gpu": Contender(
        about="an HPA for each role on GPU utilisation",
        make=_baseline(_hpa_gpu),
        first_units=_at_midnight,
        start={"target": 0.7},
        space={"target": (0.5, 0.6, 0.7, 0.8)},
    ),
    "hpa-custom": Contender(
        about="an HPA for each role: prefill on GPU utilisation, decode on running requests, targets measured",
        make=_baseline(_hpa_custom),
        first_units=_at_midnight,
        start={"load": day.TARGET_LOAD},
        space={"load": _LOADS},
    ),
    "kpa": Contender(
        about="Knative's autoscaler for each role on requests in flight, targets measured",
        make=_baseline(_kpa),
        first_units=_at_midnight,
        start={"load": day.TARGET_LOAD, "down_cooldown_s": DOWN_WINDOW_S},
        space={"load": _LOADS, "down_cooldown_s": (DOWN_WINDOW_S,)},
    ),
    "dynamo-load": Contender(
        about="Dynamo's load planner: prefill by its queue, decode by its KV cache",
        make=_baseline(_dynamo),
        first_units=_at_midnight,
        start={"kv_up": 0.6, "kv_down": 0.3, "queue_up": 0.5, "queue_down": 0.1, "period_s": 30.0},
        space={
            "kv_up": (0.3, 0.4, 0.6),
            "kv_down": (0.1, 0.2, 0.3),
            "queue_up": (0.1, 0.2, 0.5),
            "queue_down": (0.02, 0.1),
            "period_s": (10.0, 30.0),
        },
    ),
    "dynamo-sla": Contender(
        about="Dynamo's SLA planner: forecast load over what the engine model profiles of a replica",
        make=_baseline(_dynamo_sla),
        first_units=_at_midnight,
        start={"kalman": 1.0, "period_s": 30.0},
        space={"kalman": (0.0, 1.0), "period_s": (10.0, 30.0)},
    ),
    "periodic": Contender(
        about="a timetable for both roles that knows the day's curve, and no more of the day than that",
        make=_baseline(_periodic),
        first_units=_at_midnight,
        start={"load": day.TARGET_LOAD, "ahead_s": START_UP_S},
        space={"load": _LOADS, "ahead_s": (START_UP_S,)},
    ),
    "oracle": Contender(
        about="knows the tokens of the next two minutes, each role by itself",
        make=_oracle,
        first_units=_at_midnight,
        start={"horizon_s": 120.0, "window_s": 30.0, "load": day.TARGET_LOAD},
        space={"horizon_s": (120.0,), "window_s": (30.0,), "load": _LOADS},
    ),
    "trimtab-plain": Contender(
        about="Trimtab: decode TPS for both roles at their ratio",
        make=_trimtab(brake=False),
        first_units=_at_midnight,
        start={"load": day.TARGET_LOAD},
        space={"load": _LOADS},
    ),
    "trimtab": Contender(
        about="the same with the latency brake",
        make=_trimtab(brake=True),
        first_units=_at_midnight,
        start={"load": day.TARGET_LOAD},
        space={"load": _LOADS},
    ),
}


def run_setting(duration_s: float, setting: Setting, case: Case) -> RunResult:
    """A contender with some setting on one day."""
    contender = CONTENDERS[case.policy]
    trace = day.requests_of_day(case.seed, duration_s)
    return run_scaled(
        day.scaled_setup(day.service_policy(), contender.first_units()),
        trace,
        contender.make(setting, trace),
        policy=case.policy,
        trace=case.trace,
        seed=case.seed,
        duration_s=duration_s,
    )


def run_case(duration_s: float, case: Case) -> RunResult:
    """A contender with the setting that it has."""
    return run_setting(duration_s, setting_of(case.policy), case)


def cost(runs: Sequence[RunSummary]) -> float:
    """GPU-hours, where the SLO is kept for `ATTAINED` of the requests; what is missed costs more than any GPU."""
    total = 0.0
    for run in runs:
        share = run.total.slo_attainment
        if share is None:
            return float("inf")
        total += run.gpu_hours * (1.0 + 20.0 * max(0.0, ATTAINED - share))
    return total


def bars(evaluation: Evaluation) -> Sequence[Bar]:
    """The bars: nothing is lost; Trimtab saves GPUs against a fleet for the peak, and keeps the SLO nearly as well."""
    saved = evaluation.change("trimtab", "day", "gpu_hours", against="static-peak").median
    return (
        at_most("lost_requests", evaluation.lost_requests(), 0),
        at_least(
            "gpu_hours_saved_against_peak",
            None if saved is None else -saved,
            SAVED_AGAINST_PEAK,
            policies=("trimtab", "static-peak"),
        ),
        at_least(
            "slo_attainment",
            evaluation.confidence("trimtab", "day", "slo_attainment").median,
            ATTAINED,
            policies=("trimtab",),
        ),
    )


def suite(options: Options) -> Suite:
    """The suite; a shorter `--duration` is the first part of the day. Raises `SuiteError` for one out of range."""
    duration_s = day.DURATION_S if options.duration_s is None else options.duration_s
    if not MIN_DURATION_S <= duration_s <= day.DURATION_S:
        raise SuiteError(f"--duration must be {MIN_DURATION_S:g} to {day.DURATION_S:g} s, not {duration_s:g}")
    return Suite(
        name="diurnal",
        title="A prefill and decode service over a day",
        description=(
            f"One chat service ({SERVICE_A.prompt_tokens:.0f} tokens in, {SERVICE_A.output_tokens:.0f} out) over a "
            f"workday that runs {day.COMPRESS:g} times as fast as a real one. Replicas start in the time of their "
            "profile, so a start takes as much of the day as several minutes would."
        ),
        policies={name: described(name) for name in CONTENDERS},
        baseline="static-peak",
        traces={"day": "many bursty clients, a morning and an afternoon peak, a deep valley at night"},
        seeds=day.HELD_OUT_SEEDS,
        slos={day.NAME: day.SLO},
        run=functools.partial(run_case, duration_s),
        inputs=_inputs(duration_s),
        bars=bars,
        plotted=("trimtab", "hpa-gpu", "static-peak"),
        tunings={
            name: Tuning(
                space=contender.space,
                start=contender.start,
                traces=("day",),
                seeds=day.TRAINING_SEEDS,
                run=functools.partial(run_setting, duration_s),
                cost=cost,
                cost_name=f"GPU-hours, dearer where less than {ATTAINED:.0%} is in time",
                max_trials=12,
                finalists=FINALISTS,
            )
            for name, contender in CONTENDERS.items()
            if contender.space
        },
        tuned_file=TUNED_FILE,
    )


def _inputs(duration_s: float) -> dict[str, object]:
    return {
        "duration_s": duration_s,
        "compress": day.COMPRESS,
        "profile": day.PROFILE,
        "unit": dataclasses.asdict(day.UNIT),
        "most_units": day.MOST_UNITS,
        "target_load": day.TARGET_LOAD,
        "peak_units": day.PEAK_UNITS,
        "training_seeds": day.TRAINING_SEEDS,
        "settings": {name: dict(setting_of(name)) for name in CONTENDERS},
    }
