"""The study as a document for machines and as a report in Markdown. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from lab.studies.findings import Study, Verdict
from lab.studies.observing import LATENCIES, Signal
from lab.studies.runs import MORNING_HOURS, STEPS
from lab.studies.steering import TARGET_LOAD


def document(study: Study) -> dict[str, object]:
    """Settings, measures, cliffs, curves, rules and findings as plain data; latencies in seconds."""
    setting = study.setting
    return {
        "study": "signals",
        "inputs": {
            "profile": setting.profile.name,
            "service": dataclasses.asdict(setting.service),
            "unit": dataclasses.asdict(setting.unit),
            "units": setting.units,
            "compress": setting.compress,
            "window_s": setting.window_s,
            "peak_load": setting.peak_load,
            "target_load": TARGET_LOAD,
            "seed": setting.seed,
        },
        "capacity_rps": study.capacity_rps,
        "measures": {str(signal): dataclasses.asdict(one) for signal, one in study.measures().items()},
        "cliffs": {str(signal): dataclasses.asdict(one) for signal, one in study.cliffs().items()},
        "by_load": [
            {
                "load": load,
                **{str(signal): window.values[signal] for signal in Signal},
                "decode arithmetic": window.decode_arithmetic_ratio,
                "TBT with prefill to spare": spare.values[Signal.TBT],
            }
            for load, window, spare in zip(STEPS, study.curve, study.decode_curve, strict=True)
        ],
        "rules": {
            str(signal): {
                name: getattr(run, name)
                for name in ("actions", "reversals", "unit_hours", "follows", "over", "short", "attainment")
            }
            for signal, run in study.scaled.items()
        },
        "scaled_day_unit_hours": study.scaled_day.unit_hours,
        "fixed_day_unit_hours": setting.units * 24.0,
        "findings": [{**dataclasses.asdict(one), "verdict": str(one.verdict)} for one in study.findings()],
    }


def markdown(study: Study, figures: Sequence[str]) -> str:
    """The report; `figures` are files beside it: by load, over the day, as rules."""
    by_load, day, rules = figures
    found = study.findings()
    counts = Counter(one.verdict for one in found)
    lines = [
        "# Eight signals for scaling: what the simulator shows of HeteroScale's findings",
        "",
        _setting_text(study),
        "",
        ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict) + f", of {len(found)} findings.",
        "",
        "## Findings",
        "",
        "| finding | where | here | figures |",
        "|---|---|---|---|",
        *(f"| {one.claim} | {one.where} | **{one.verdict}** | {one.figures} |" for one in found),
        "",
        "## Over a day at fixed size",
        "",
        *_measure_lines(study),
        "",
        f"![The signals over the day]({day})",
        "",
        "## By load",
        "",
        "Steady Poisson arrivals; a load of 1 is what the service serves within its limits for nine requests in ten.",
        "",
        *_load_lines(study),
        "",
        f"![The signals by load]({by_load})",
        "",
        "## As rules",
        "",
        f"Each signal alone scales the service from {MORNING_HOURS[0]:g} h to {sum(MORNING_HOURS):g} h.",
        "",
        *_rule_lines(study),
        "",
        f"![Units under each rule]({rules})",
        "",
        "## What to keep in mind",
        "",
        *_caveats(study),
        "",
    ]
    return "\n".join(lines)


def _setting_text(study: Study) -> str:
    setting, service = study.setting, study.setting.service
    return (
        f"Service {service.name}: {service.prompt_tokens:.0f} tokens in, {service.output_tokens:.0f} out, TTFT "
        f"{service.ttft_s:g} s, TBT {1000 * service.tbt_s:g} ms. {setting.units} units of {setting.unit.prefill} "
        f"prefill and {setting.unit.decode} decode replicas, profile `{setting.profile.name}`; together they serve "
        f"{study.capacity_rps:.1f} requests/s within the limits. The day of {setting.clients} bursty clients peaks at "
        f"{setting.peak_load:.0%} of that and runs {setting.compress:g} times as fast as a real one, as do windows "
        f"({setting.window_s:g} s of the day), a unit's start ({setting.start_up_s:g} s) and coolings. Seed "
        f"{setting.seed}."
    )


def _measure_lines(study: Study) -> list[str]:
    lines = [
        "| signal | Pearson | Spearman | R² of a line | elasticity | peak / valley | signal-to-noise |",
        "|---|---|---|---|---|---|---|",
    ]
    for signal, one in study.measures().items():
        row = (one.pearson, one.spearman, one.line_r2, one.elasticity, one.dynamic_range)
        snr = "–" if one.snr_db is None else f"{one.snr_db:.1f} dB"
        lines.append(f"| {signal} | " + " | ".join("–" if v is None else f"{v:.2f}" for v in row) + f" | {snr} |")
    return lines


def _load_lines(study: Study) -> list[str]:
    lines = [
        "| load | " + " | ".join(str(signal) for signal in Signal) + " | TBT, prefill to spare | decode arithmetic |",
        "|---" * (3 + len(Signal)) + "|",
    ]
    for load, window, spare in zip(STEPS, study.curve, study.decode_curve, strict=True):
        if round(100 * load) % 10 and load < 0.9:
            continue
        cells = [_cell(signal, window.values[signal]) for signal in Signal]
        cells += [_cell(Signal.TBT, spare.values[Signal.TBT]), f"{window.decode_arithmetic_ratio:.3f}"]
        lines.append(f"| {load:.2f} | " + " | ".join(cells) + " |")
    return lines


def _cell(signal: Signal, value: float | None) -> str:
    if value is None:
        return "–"
    if signal in LATENCIES:
        return f"{1000 * value:.0f} ms"
    return f"{value:.0f}" if "TPS" in signal else f"{value:.3f}"


def _rule_lines(study: Study) -> list[str]:
    lines = [
        "| signal | actions | reversals | correlation with load | units / needed | too small | unit hours | in time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for signal, run in study.scaled.items():
        follows = "–" if run.follows is None else f"{run.follows:.2f}"
        lines.append(
            f"| {signal} | {run.actions} | {run.reversals} | {follows} | {run.over:.2f} | {run.short:.0%} "
            f"| {run.unit_hours:.1f} | {run.attainment:.0%} |"
        )
    return lines


def _caveats(study: Study) -> list[str]:
    arithmetic = study.curve[STEPS.index(1.0)].decode_arithmetic_ratio
    text = f"""\
- Everything here comes from a model of an engine; nothing was measured on GPUs. The seed's model, GPUs and traces are
  not public: shapes can be compared, figures cannot.
- SM activity follows the counter's definition, which counts warps that wait for memory: busy time less the host's part
  of each iteration, with every kernel on every SM. Of the decode GPUs' arithmetic, {arithmetic:.0%} is used at a load
  of 1: a reading of SM activity as arithmetic would be low, and proportional to decode TPS.
- GPU utilisation counts an iteration's host part as busy, and so it is 1 wherever a sequence decodes. The seed's 0.82
  to 0.86 has gaps that this model does not know.
- Latencies are means over a window. Replicas are alike and routed by their load, so they differ less than real ones.
- The rules have no guards but coolings and a band around their target; the product's have more."""
    return text.split("\n")
