"""Figures as text: three significant digits at most, a unit where it helps, a dash for what is missing."""

from __future__ import annotations

import dataclasses

from lab.evaluation.confidence import Confidence

MISSING = "–"


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """How a metric is called and written."""

    title: str
    unit: str = ""
    factor: float = 1.0
    digits: int | None = None
    """After the point; None: as many as make three significant ones."""

    def text(self, value: float | None) -> str:
        """A value without its unit."""
        if value is None:
            return MISSING
        scaled = value * self.factor
        return f"{scaled:.{_digits(scaled) if self.digits is None else self.digits}f}"

    @property
    def heading(self) -> str:
        """Title and unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title


def _digits(value: float) -> int:
    size = abs(value)
    return 3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0


_LATENCY_FIELDS = {"mean_s": "mean", "p50_s": "P50", "p95_s": "P95", "p99_s": "P99"}

SHOWN = {
    "slo_attainment": Shown("in SLO", "%", 100.0, 1),
    "ttft_attainment": Shown("TTFT in SLO", "%", 100.0, 1),
    "tpot_attainment": Shown("TPOT in SLO", "%", 100.0, 1),
    "goodput_rps": Shown("goodput", "req/s"),
    "output_tps": Shown("output", "tok/s", digits=0),
    "requests": Shown("requests", digits=0),
    "complete": Shown("complete", digits=0),
    "lost": Shown("lost", digits=0),
    "unfinished": Shown("cut off", digits=0),
    "reissued": Shown("reissued", digits=0),
    **{f"e2e_{field}": Shown(f"E2E {title}", "s") for field, title in _LATENCY_FIELDS.items()},
    **{f"ttft_{field}": Shown(f"TTFT {title}", "s") for field, title in _LATENCY_FIELDS.items()},
    **{f"tpot_{field}": Shown(f"TPOT {title}", "ms", 1000.0, 1) for field, title in _LATENCY_FIELDS.items()},
    "gpu_hours": Shown("GPU-hours"),
    "energy_kwh": Shown("energy", "kWh"),
    "transitions": Shown("transitions", digits=1),
    "wakes": Shown("wakes", digits=1),
    "releases": Shown("releases", digits=1),
}
"""By the name of the metric."""


def with_interval(metric: str, confidence: Confidence, sign: str = " ± ") -> str:
    """Mean and half the width of its confidence interval, as `1.23 ± 0.04`; the mean alone where there is none."""
    shown = SHOWN[metric]
    if confidence.mean is None or confidence.ci_high is None:
        return shown.text(confidence.mean)
    digits = _digits(confidence.mean * shown.factor) if shown.digits is None else shown.digits
    half = dataclasses.replace(shown, digits=digits).text(confidence.ci_high - confidence.mean)
    return f"{shown.text(confidence.mean)}{sign}{half}"


def with_range(metric: str, confidence: Confidence) -> str:
    """Median and the least and largest of the seeds, as `1.23 (1.10 to 1.31)`."""
    shown = SHOWN[metric]
    if confidence.median is None or confidence.seeds < 2:
        return shown.text(confidence.median)
    return f"{shown.text(confidence.median)} ({shown.text(confidence.low)} to {shown.text(confidence.high)})"


def change_text(value: float | None) -> str:
    """A relative change in percent, with its sign; as a factor from four times on."""
    if value is None:
        return MISSING
    return f"×{1 + value:.1f}" if value >= 3 else f"{100 * value:+.0f}%"
