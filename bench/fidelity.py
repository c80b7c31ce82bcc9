"""How true the simulator is to measurements that its fit did not see: ``python -m bench.fidelity --json``.

Two comparisons. Whole replicas: every end-to-end row of vLLM with Llama, Qwen3 or gpt-oss on the H100 and the B200 is
simulated as a closed loop. Operator tables and specifications of both systems are used; what they lack (host, launches,
efficiencies) is fitted to the rows of one system alone, and the other system's rows grade it, in both directions. No
row is left out: saturated and misrecorded ones count in the bars, and the report shows errors without them beside, with
servers as their sources alone describe them, and of the fit that saw the graded rows: what the form can reach at best.
Overload: the recorded run on an RTX PRO 6000 gives the host's share of iterations, the one on an RTX 4090 grades.

The fits are packaged; ``--refit`` makes those of the end-to-end rows anew (minutes) and writes them. The recorded
material is looked for in ``--material``, else TRIMTAB_TEST_MATERIAL, else ``../shared``.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lab.fit_profiles import fit_host
from lab.fitting import correcting
from lab.fitting.silicon import B200, H100, SiliconRow, read_silicon
from lab.fitting.tables import Array, TableError, rows
from lab.material import MEANING, MaterialError, perf_folder

MEDIAN_BAR, P90_BAR = 0.15, 0.35
THROUGHPUT_BAR, LATENCY_BAR, QUEUE_BAR = 0.05, 0.10, 0.10
_SPLITS = {"h100_to_b200": (H100, B200), "b200_to_h100": (B200, H100)}
_MEASURED = ("silicon_ttft_ms", "silicon_tpot_ms")
_CORRECTIONS = Path(correcting.__file__).with_name("corrections.yaml")


def summary(errors: Array) -> dict[str, float]:
    """Median, 90th percentile and mean sign of relative errors, given the logarithms of predicted over measured."""
    absolute = np.abs(np.expm1(errors))
    return {
        "median": round(float(np.median(absolute)), 4),
        "p90": round(float(np.quantile(absolute, 0.9)), 4),
        "median_signed": round(float(np.median(np.expm1(errors))), 4),
        "rows": len(errors),
    }


def by_model(table: Sequence[SiliconRow], errors: Array) -> dict[str, dict[str, dict[str, float]]]:
    """Errors of TTFT and TPOT for each model, precision and tensor parallelism."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(table):
        deployment = row.deployment
        dtype = deployment.moe_dtype or deployment.gemm_dtype
        groups[f"{deployment.architecture.name} {dtype} tp{deployment.tensor_parallel}"].append(index)
    return {
        name: {"ttft": summary(errors[members, 0]), "tpot": summary(errors[members, 1])}
        for name, members in sorted(groups.items())
    }


def scatter(perf: Path) -> dict[str, dict[str, float]]:
    """The spread of repeats of a row, over vLLM's rows of every model: relative to the group's mean."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in rows(perf / "aiconfigurator" / "silicon_e2e.csv.gz"):
        if (row["backend"], row["mode"]) != ("vllm", "agg"):
            continue
        key = tuple(value for name, value in row.items() if name not in ("measured", *_MEASURED))
        groups[key].append((float(row[_MEASURED[0]]), float(row[_MEASURED[1]])))
    repeated = [np.array(values) for values in groups.values() if len(values) > 1]
    apart = np.concatenate([np.abs(values / values.mean(axis=0) - 1) for values in repeated])
    return {
        name: {
            "rows": len(apart),
            "median": round(float(np.median(apart[:, column])), 4),
            "p90": round(float(np.quantile(apart[:, column], 0.9)), 4),
        }
        for column, name in enumerate(("ttft", "tpot"))
    }


def end_to_end(perf: Path) -> dict[str, dict[str, object]]:
    """Errors of each direction on the graded system's rows."""
    corrections = correcting.packaged_corrections()
    result: dict[str, dict[str, object]] = {}
    for direction, (fitted, graded) in _SPLITS.items():
        table = read_silicon(perf, graded)
        errors = correcting.log_errors(perf, table, corrections[fitted])
        seen = correcting.log_errors(perf, table, corrections[graded])
        documented = correcting.log_errors(perf, read_silicon(perf, graded, as_documented=True), corrections[fitted])
        calm = np.array([not row.saturated for row in table])
        known = np.array([not row.misrecorded for row in table])
        result[direction] = {
            "fitted_on": fitted,
            "graded_on": graded,
            "ttft": summary(errors[:, 0]),
            "tpot": summary(errors[:, 1]),
            "saturated_rows": int((~calm).sum()),
            "without_saturated": {"ttft": summary(errors[calm, 0]), "tpot": summary(errors[calm, 1])},
            "misrecorded_rows": int((~known).sum()),
            "without_misrecorded": {"ttft": summary(errors[known, 0]), "tpot": summary(errors[known, 1])},
            "servers_as_documented": {"ttft": summary(documented[:, 0]), "tpot": summary(documented[:, 1])},
            "fit_that_saw_them": {"ttft": summary(seen[:, 0]), "tpot": summary(seen[:, 1])},
            "by_model": by_model(table, errors),
        }
    return result


def bars(directions: dict[str, dict[str, object]], overload: dict[str, float]) -> list[dict[str, object]]:
    """Each bar with its value; those of the end-to-end rows hold median and P90 of each direction."""
    found: list[dict[str, object]] = []
    for name in ("ttft", "tpot"):
        value: dict[str, dict[str, float]] = {}
        for direction, result in directions.items():
            part = result[name]
            if isinstance(part, dict):
                value[direction] = {"median": part["median"], "p90": part["p90"]}
        ok = all(v["median"] <= MEDIAN_BAR and v["p90"] <= P90_BAR for v in value.values())
        bar = {"median": MEDIAN_BAR, "p90": P90_BAR}
        found.append({"name": f"{name}_median_error", "value": value, "bar": bar, "ok": ok})
    worst = {
        "overload_throughput_error": (abs(overload["throughput"]), THROUGHPUT_BAR),
        "overload_latency_error": (
            max(abs(overload[key]) for key in ("ttft_p50", "ttft_p95", "e2e_p50", "e2e_p95")),
            LATENCY_BAR,
        ),
        "overload_queue_error": (max(overload["running"], overload["waiting"]), QUEUE_BAR),
    }
    found.extend({"name": n, "value": round(v, 4), "bar": bar, "ok": v <= bar} for n, (v, bar) in worst.items())
    return found


def run(perf: Path) -> dict[str, object]:
    """The whole report."""
    host = fit_host(perf)
    overload = {
        **dataclasses.asdict(host.graded),
        "running": host.running_error,
        "waiting": host.waiting_error,
    }
    directions = end_to_end(perf)
    return {
        "bench": "fidelity",
        "split": {
            "end_to_end": "operator tables and specifications of both systems; end-to-end rows of the fit system alone",
            "overload": "host_s and prefill_s fitted on the RTX PRO 6000 run; of the RTX 4090 run only the number "
            "of its KV blocks is read",
        },
        "results": {
            "end_to_end": directions,
            "scatter_of_repeats": scatter(perf),
            "overload": {
                **dataclasses.asdict(host.share),
                "fitted_run": dataclasses.asdict(host.fitted),
                "graded_run": overload,
                "kv_tokens_read_off_the_run": host.kv_tokens,
                "queue_error_is": "mean absolute difference at each second over the recorded mean",
            },
        },
        "bars": bars(directions, overload),
    }


def refit(perf: Path) -> None:
    """Fit both systems' corrections anew and write them."""
    found = {system: correcting.fit_correction(perf, read_silicon(perf, system)) for system in (H100, B200)}
    _CORRECTIONS.write_text(correcting.corrections_document(found), encoding="utf-8")
    correcting.packaged_corrections.cache_clear()


def main() -> int:
    """Print the figures; exit status 1 when a bar is missed, 2 when the material is not there."""
    parser = argparse.ArgumentParser(description="simulated against measured, on measurements the fit did not see")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--refit", action="store_true", help="fit the end-to-end corrections anew first (minutes)")
    default = os.environ.get("TRIMTAB_TEST_MATERIAL") or Path(__file__).parents[2] / "shared"
    parser.add_argument("--material", type=Path, default=Path(default), help=MEANING)
    arguments = parser.parse_args()
    try:
        perf = perf_folder(arguments.material)
        if arguments.refit:
            refit(perf)
        report = run(perf)
    except MaterialError as error:
        print(f"fidelity: {error}; pass it with --material FOLDER or TRIMTAB_TEST_MATERIAL", file=sys.stderr)
        return 2
    except TableError as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return 2
    found = report["bars"]
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        results = report["results"]
        if isinstance(results, dict):
            print(f"scatter of the table's own repeats: {json.dumps(results['scatter_of_repeats'])}")
        for bar in found if isinstance(found, list) else []:
            print(f"{bar['name']}: {json.dumps(bar['value'])} (bar {bar['bar']}) {'ok' if bar['ok'] else 'MISSED'}")
    return 0 if isinstance(found, list) and all(bar["ok"] for bar in found) else 1


if __name__ == "__main__":
    sys.exit(main())
