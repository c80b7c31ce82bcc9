"""The contenders of the TRE suite on the identical runtime: they differ in the controller and in the first awake set.

KV-Auto as the paper describes it starts from one replica of each model. All others start from the static split.
Baselines that scale by counts request counts; `lab.virtual.counts` finds the GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lab.baselines.catalogue import BASELINES
from lab.baselines.interface import Desired, FleetView, RoleKey, started
from lab.baselines.oracle import Oracle, demand_of
from lab.baselines.static import Static
from lab.baselines.tuning import Setting
from lab.evaluation.tuning import TunedPolicy, read_tuned
from lab.suites.calibrate_shares import PUBLISHED, SHIPPED, packaged_shares
from lab.suites.loads import Loads
from lab.suites.tre_setup import (
    FIRST_SLEEPS_DONE,
    GPU_MEMORY_GIB,
    GPU_TYPE,
    ONE_EACH,
    PROFILE_NAMES,
    STATIC_SPLIT,
    plain_pool,
    profiles,
    service_policies,
)
from lab.virtual.control import Controller, ShareController
from lab.virtual.counts import CountController
from lab.virtual.pool_run import START_S, PoolSetup
from simulator.profiles import find_profile, packaged_profiles
from simulator.traces.model import TraceRequest
from simulator.traces.probes import MODELS
from trimtab.config.poolrules import PoolRules
from trimtab.config.resources import Pool, ServicePolicy

BEAT_S = 1.0
"""How often a controller can have its turn: at each scrape."""
ORACLE_HORIZON_S = 10.0
TUNED_FILE = Path(__file__).parent / "tre_tuned.yaml"

Trace = Sequence[TraceRequest]
MakeController = Callable[[Trace, Loads, Setting], Controller]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One of those compared. `start` are its thresholds, but for those that tuning found; `space` is empty where there
    is nothing to tune.
    """

    name: str
    about: str
    controller: MakeController
    start: Setting = dataclasses.field(default_factory=dict)
    space: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    max_trials: int = 20
    awake: Mapping[str, int] = dataclasses.field(default_factory=lambda: STATIC_SPLIT)
    pool: Callable[[Setting], Pool] = lambda setting: plain_pool()
    """The pool's own rules; baselines by counts do not look at them, but for the time that a drain may take."""
    published: bool = False
    """Whether the services have what the paper gives them (`policies_of`)."""

    @property
    def setting(self) -> Setting:
        """Its thresholds: as tuned where it was."""
        found = tuned_settings().get(self.name)
        return self.start if found is None or not self.space else found.setting

    @property
    def described(self) -> str:
        """What it is, and where its thresholds are from."""
        if not self.space:
            return self.about
        found = tuned_settings().get(self.name)
        if found is None:
            return f"{self.about}; not tuned"
        return f"{self.about}; tuned on seeds {', '.join(map(str, found.seeds))}"

    def pool_document(self) -> dict[str, object]:
        """The pool's spec as plain data."""
        return self.pool(self.setting).spec.model_dump(mode="json", by_alias=True)


@functools.cache
def tuned_settings() -> Mapping[str, TunedPolicy]:
    """What `trimtab evaluate tre --tune POLICY --write` has found, by contender."""
    return read_tuned(TUNED_FILE)


def setup_of(contender: Contender, setting: Setting, loads: Loads) -> PoolSetup:
    """What a run of it needs beside the trace."""
    packaged = packaged_profiles()
    return PoolSetup(
        pool=contender.pool(setting),
        policies=policies_of(loads, published=contender.published),
        profiles={name: find_profile(packaged, name) for name in sorted(PROFILE_NAMES.values())},
        gpu_memory_gib=GPU_MEMORY_GIB,
        gpu_type=GPU_TYPE,
        scrape_s=BEAT_S,
        first_sleeps_done=FIRST_SLEEPS_DONE,
    ).with_awake(contender.awake)


def policies_of(loads: Loads, *, published: bool = False) -> tuple[ServicePolicy, ...]:
    """The three services, with what TSS knows of each; with `published` in the paper's form, and with its guards."""
    found = profiles()
    packaged = packaged_shares(PUBLISHED if published else SHIPPED)
    shares = {}
    for model in MODELS:
        cost, timing = loads.costs[model], found[model].timing
        shares[model] = packaged[model].model_copy(
            update={
                "capacity_prefill_tps": float(f"{1.0 / cost.prompt_token_s:.3g}"),
                "capacity_decode_tps": float(f"{1.0 / cost.output_token_s:.3g}"),
                "base_tpot_s": round(timing.host_s + timing.weights_s, 4),
            }
        )
    return service_policies(shares, guards=published)


def _static(trace: Trace, loads: Loads, setting: Setting) -> Controller:
    del trace, loads, setting
    return CountController(started(Static()), period_s=5.0)


def _baseline(name: str) -> MakeController:
    """A baseline of the catalogue. It sees every beat, and decides at its own period where it has one."""

    def make(trace: Trace, loads: Loads, setting: Setting) -> Controller:
        del trace, loads
        return CountController(BASELINES[name].started(setting), period_s=BEAT_S)

    return make


def _oracle(trace: Trace, loads: Loads, setting: Setting) -> Controller:
    costs = {RoleKey(model): loads.costs[model].request_s for model in MODELS}
    tick = started(
        Oracle(
            demand=demand_of(trace, costs, window_s=setting["window_s"]),
            horizon_s=setting["horizon_s"],
            load=setting["load"],
            spend_all=True,
        )
    )
    # The oracle's demand is on the trace's clock.
    on_trace_s: Callable[[FleetView], Desired] = lambda view: tick(  # noqa: E731 - a typed closure
        dataclasses.replace(view, now_s=view.now_s - START_S)
    )
    return CountController(on_trace_s, period_s=setting["period_s"])


def _trimtab(trace: Trace, loads: Loads, setting: Setting) -> Controller:
    del trace, loads, setting
    return ShareController()


def _plain(trace: Trace, loads: Loads, setting: Setting) -> Controller:
    """The paper's main loop: it polls with the fast cadence, and each poll moves a smoothed share by one window."""
    del trace, loads, setting
    return ShareController(period_s=plain_pool().spec.rescue_interval_s, polls=True)


def plain_rules_pool(setting: Setting) -> Pool:
    """The paper's rules and cadences. It names no time for which a receiver may not give."""
    del setting
    return with_spec(plain_pool(), rules=PoolRules.plain(), residence_s=0.0)


def shipped_pool(setting: Setting, **spec: object) -> Pool:
    """A pool with the default rules and cadences, but for what `spec` names."""
    del setting
    named = {"cluster", "gpus", "members"}
    pool = plain_pool()
    kept = {name: getattr(pool.spec, name) for name in named}
    return pool.model_copy(update={"spec": type(pool.spec).model_validate({**kept, **spec})})


def with_spec(pool: Pool, **spec: object) -> Pool:
    """The pool with other fields in its spec, checked as a user's would be."""
    fields = {name: getattr(pool.spec, name) for name in type(pool.spec).model_fields}
    return pool.model_copy(update={"spec": type(pool.spec).model_validate({**fields, **spec})})


_KV_SPACE = {"high": (0.1, 0.15, 0.2, 0.25, 0.35, 0.5), "low": (0.05, 0.1, 0.15, 0.2)}
_SPACES: Mapping[str, Mapping[str, Sequence[float]]] = {
    "hpa-running": {"target": (4.0, 8.0, 16.0, 32.0), "down_window_s": (0.0, 30.0), "period_s": (5.0,)},
    "aibrix-apa": {
        "target": (0.15, 0.3, 0.5),
        "window_s": (5.0, 15.0),
        "down_cooldown_s": (0.0, 30.0),
        "period_s": (5.0,),
    },
    "aibrix-kpa": {
        "target": (8.0, 16.0, 32.0),
        "stable_window_s": (15.0, 60.0),
        "panic_window_s": (6.0,),
        "down_cooldown_s": (0.0, 30.0),
    },
    "wva": {
        "kv_threshold": (0.4, 0.8),
        "queue_threshold": (3.0, 5.0),
        "kv_spare": (0.1,),
        "queue_spare": (1.0, 2.0),
        "period_s": (5.0,),
    },
}
"""Where autoscalers that were made for other machines are tuned: at the pool's cadence, windows of seconds."""


def _kv_contenders() -> Iterator[Contender]:
    yield Contender(
        name="kv-auto",
        about="KV-Auto as TRE describes it: 0.7 and 0.3 of the KV cache, each 5 s, from one replica of each model",
        controller=_baseline("kv-auto"),
        start={**BASELINES["kv-auto"].defaults, "period_s": 5.0},
        awake=ONE_EACH,
    )
    for period_s in (5.0, 1.0):
        yield Contender(
            name=f"kv-auto-{period_s:g}s",
            about=f"queue-aware KV-Auto, each {period_s:g} s",
            controller=_baseline("kv-auto-queue"),
            start={"high": 0.2, "low": 0.15, "period_s": period_s},
            space={**_KV_SPACE, "period_s": (period_s,)},
        )


def _other_baselines() -> Iterator[Contender]:
    for short, name in (
        ("hpa", "hpa-running"),
        ("aibrix-apa", "aibrix-apa"),
        ("aibrix-kpa", "aibrix-kpa"),
        ("wva", "wva"),
    ):
        yield Contender(
            name=short,
            about=BASELINES[name].reference,
            controller=_baseline(name),
            start={key: values[0] for key, values in _SPACES[name].items()},
            space=_SPACES[name],
        )


def _trimtabs() -> Iterator[Contender]:
    yield Contender(
        name="trimtab-plain",
        about="Trimtab with the paper's rules, form of Z, smoothing and cadences: rescue each 5 s, rebalance each 10 s",
        controller=_plain,
        pool=plain_rules_pool,
        published=True,
    )
    yield Contender(
        name="trimtab",
        about="Trimtab with the rules and cadences that it ships as default",
        controller=_trimtab,
        pool=shipped_pool,
    )
    yield Contender(
        name="trimtab-5s",
        about="Trimtab with its default rules at the paper's cadences: rescue each 5 s, rebalance each 10 s",
        controller=_trimtab,
        pool=functools.partial(shipped_pool, rescue_interval_s=5.0, rebalance_interval_s=10.0),
    )


def _contenders() -> Iterator[Contender]:
    yield Contender(name="static", about="a static split, two replicas of each model", controller=_static)
    yield from _kv_contenders()
    yield from _other_baselines()
    yield Contender(
        name="oracle",
        about="knows the next 10 s of the trace and what a replica carries; leaves no GPU idle",
        controller=_oracle,
        start={"horizon_s": ORACLE_HORIZON_S, "window_s": 10.0, "load": 0.65, "period_s": 5.0},
        space={
            "horizon_s": (ORACLE_HORIZON_S,),
            "window_s": (5.0, 10.0),
            # As no GPU is left idle, every load needs the same.
            "load": (0.65,),
            "period_s": (1.0, 2.0, 5.0),
        },
    )
    yield from _trimtabs()


CONTENDERS: Mapping[str, Contender] = {contender.name: contender for contender in _contenders()}
