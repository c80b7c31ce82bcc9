"""The baselines by name: how each is built of numbers, its documented defaults, and the space it is tuned in.

The static split, the SLA planner and the oracle need a split, profiles or the trace, and are built by their classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from lab.baselines.aibrix import AIBRIX_KPA, Apa, Kpa
from lab.baselines.dynamo_load import DynamoLoad
from lab.baselines.hpa import Hpa, HpaMetric
from lab.baselines.interface import Desired, EachRole, FleetView, Signal, started
from lab.baselines.kv_auto import KvAuto, LlumnixFreeness
from lab.baselines.tuning import Objective, Setting, Tuned, coordinate_search, grid_search
from lab.baselines.wva import Wva

Tick = Callable[[FleetView], Desired]

_PERIODS_S = (1.0, 5.0, 15.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One autoscaler. `start` makes a fresh one; a setting that is impossible raises ValueError."""

    name: str
    reference: str
    start: Callable[[Setting], Tick]
    defaults: Setting
    space: Mapping[str, Sequence[float]]

    def started(self, setting: Setting | None = None) -> Tick:
        """A new one, with its defaults for what the setting leaves out. Raises ValueError for unknown names."""
        unknown = sorted(set(setting or {}) - set(self.defaults))
        if unknown:
            raise ValueError(f"{self.name} has no {', '.join(unknown)}; it has {', '.join(sorted(self.defaults))}")
        return self.start({**self.defaults, **(setting or {})})

    def tuned(self, cost: Callable[[Tick], float], *, exhaustive: bool = False, max_trials: int = 200) -> Tuned:
        """Its best setting for a cost of running it: along its coordinates from the defaults, or over the grid."""
        objective: Objective = lambda setting: cost(self.started(setting))  # noqa: E731 - a typed closure
        if exhaustive:
            return grid_search(self.space, objective, max_trials=max_trials)
        return coordinate_search(self.space, objective, start=self.defaults, max_trials=max_trials)


def _kv_auto(queue_aware: bool) -> Callable[[Setting], Tick]:
    return lambda s: started(
        EachRole(KvAuto(high=s["high"], low=s["low"], queue_aware=queue_aware, period_s=s["period_s"]))
    )


def _llumnix(s: Setting) -> Tick:
    return started(
        EachRole(LlumnixFreeness(grow_below=s["grow_below"], shrink_above=s["shrink_above"], period_s=s["period_s"]))
    )


def _hpa(signal: Signal) -> Callable[[Setting], Tick]:
    return lambda s: started(
        EachRole(
            Hpa(
                metrics=(HpaMetric(signal=signal, target=s["target"]),),
                down_window_s=s["down_window_s"],
                period_s=s["period_s"],
            )
        )
    )


def _apa(s: Setting) -> Tick:
    return started(
        EachRole(
            Apa(
                target=s["target"],
                window_s=s["window_s"],
                down_cooldown_s=s["down_cooldown_s"],
                period_s=s["period_s"],
            )
        )
    )


def _kpa(base: Kpa) -> Callable[[Setting], Tick]:
    return lambda s: started(
        EachRole(
            dataclasses.replace(
                base,
                target=s["target"],
                stable_window_s=s["stable_window_s"],
                panic_window_s=s["panic_window_s"],
                down_cooldown_s=s["down_cooldown_s"],
            )
        )
    )


def _kpa_defaults(base: Kpa) -> Setting:
    return {
        "target": base.target,
        "stable_window_s": base.stable_window_s,
        "panic_window_s": base.panic_window_s,
        "down_cooldown_s": base.down_cooldown_s,
    }


def _wva(s: Setting) -> Tick:
    return started(
        EachRole(
            Wva(
                kv_threshold=s["kv_threshold"],
                queue_threshold=s["queue_threshold"],
                kv_spare=s["kv_spare"],
                queue_spare=s["queue_spare"],
                period_s=s["period_s"],
            )
        )
    )


def _dynamo_load(s: Setting) -> Tick:
    return started(
        EachRole(
            DynamoLoad(
                kv_up=s["kv_up"],
                kv_down=s["kv_down"],
                queue_up=s["queue_up"],
                queue_down=s["queue_down"],
                period_s=s["period_s"],
            )
        )
    )


_KV_SPACE = {"high": (0.2, 0.35, 0.45, 0.6, 0.7, 0.8, 0.9), "low": (0.05, 0.15, 0.25, 0.3, 0.5), "period_s": _PERIODS_S}
_KV_DEFAULTS = {"high": 0.7, "low": 0.3, "period_s": 10.0}
_HPA_SPACE = {"down_window_s": (0.0, 30.0, 60.0, 300.0), "period_s": _PERIODS_S}
_KPA_SPACE = {
    "target": (4.0, 8.0, 16.0, 32.0, 64.0),
    "stable_window_s": (15.0, 30.0, 60.0, 180.0),
    "panic_window_s": (2.0, 6.0, 15.0, 60.0),
    "down_cooldown_s": (0.0, 30.0, 300.0),
}

_HPA_PAGE = "Kubernetes documentation, Horizontal Pod Autoscaling (autoscaling/v2)"
BASELINES: Mapping[str, Baseline] = {
    baseline.name: baseline
    for baseline in (
        Baseline(
            name="kv-auto",
            reference="Llumnix (OSDI 2024) as TRE §VI-A describes it; thresholds ours",
            start=_kv_auto(queue_aware=False),
            defaults=_KV_DEFAULTS,
            space=_KV_SPACE,
        ),
        Baseline(
            name="kv-auto-queue",
            reference="the same with Llumnix's KV ratio, which counts waiting requests' blocks (24220fb)",
            start=_kv_auto(queue_aware=True),
            defaults=_KV_DEFAULTS,
            space=_KV_SPACE,
        ),
        Baseline(
            name="llumnix",
            reference="Llumnix 24220fb, docs/Arguments.md: remaining steps, thresholds 10 and 60, 10 s",
            start=_llumnix,
            defaults={"grow_below": 10.0, "shrink_above": 60.0, "period_s": 10.0},
            space={
                "grow_below": (3.0, 10.0, 30.0, 60.0),
                "shrink_above": (30.0, 60.0, 120.0, 300.0),
                "period_s": _PERIODS_S,
            },
        ),
        Baseline(
            name="hpa-gpu",
            reference=f"{_HPA_PAGE}, GPU utilisation as a custom metric; target ours",
            start=_hpa(Signal.GPU_UTILIZATION),
            defaults={"target": 0.7, "down_window_s": 300.0, "period_s": 15.0},
            space={"target": (0.3, 0.5, 0.6, 0.7, 0.8, 0.9), **_HPA_SPACE},
        ),
        Baseline(
            name="hpa-running",
            reference=f"{_HPA_PAGE}, running requests a replica as a custom metric; target ours",
            start=_hpa(Signal.RUNNING),
            defaults={"target": 20.0, "down_window_s": 300.0, "period_s": 15.0},
            space={"target": (4.0, 8.0, 16.0, 32.0, 64.0), **_HPA_SPACE},
        ),
        Baseline(
            name="aibrix-apa",
            reference="AIBrix documentation, Metric-based Autoscaling; controller at e3e10f9; target of its examples",
            start=_apa,
            defaults={"target": 0.5, "window_s": 180.0, "down_cooldown_s": 300.0, "period_s": 10.0},
            space={
                "target": (0.15, 0.3, 0.5, 0.7),
                "window_s": (5.0, 15.0, 60.0, 180.0),
                "down_cooldown_s": (0.0, 30.0, 300.0),
                "period_s": _PERIODS_S,
            },
        ),
        Baseline(
            name="aibrix-kpa",
            reference="the same page, KPA with AIBrix's windows (180 s, 60 s) and cooldown",
            start=_kpa(AIBRIX_KPA),
            defaults=_kpa_defaults(AIBRIX_KPA),
            space=_KPA_SPACE,
        ),
        Baseline(
            name="knative-kpa",
            reference="Knative documentation, About autoscaling: windows 60 s and 6 s, panic at 200 %",
            start=_kpa(Kpa()),
            defaults=_kpa_defaults(Kpa()),
            space=_KPA_SPACE,
        ),
        Baseline(
            name="wva",
            reference="llm-d-workload-variant-autoscaler b08b1c7, docs/saturation-analyzer.md",
            start=_wva,
            defaults={
                "kv_threshold": 0.8,
                "queue_threshold": 5.0,
                "kv_spare": 0.1,
                "queue_spare": 3.0,
                "period_s": 60.0,
            },
            space={
                "kv_threshold": (0.4, 0.6, 0.8, 0.9),
                "queue_threshold": (3.0, 5.0, 10.0, 20.0),
                "kv_spare": (0.05, 0.1, 0.2),
                "queue_spare": (1.0, 2.0, 3.0),
                "period_s": (5.0, 15.0, 60.0),
            },
        ),
        Baseline(
            name="dynamo-load",
            reference="Dynamo documentation, Load-based Planner; defaults of the planner",
            start=_dynamo_load,
            defaults={"kv_up": 0.9, "kv_down": 0.5, "queue_up": 5.0, "queue_down": 0.2, "period_s": 180.0},
            space={
                "kv_up": (0.4, 0.6, 0.8, 0.9),
                "kv_down": (0.1, 0.3, 0.5),
                "queue_up": (0.5, 2.0, 5.0),
                "queue_down": (0.1, 0.2),
                "period_s": (5.0, 10.0, 30.0, 180.0),
            },
        ),
    )
}
