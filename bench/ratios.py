"""P/D ratio sweeps of HeteroScale's services A and B: ``python -m bench.ratios --json``.

For every split of a fixed number of replicas into prefill and decode: the highest rate within the service's limits and
what binds there. The shape that the paper reports is an interior peak, TTFT-bound on the side of few prefill replicas
and TBT-bound on the other.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence

from bench._report import machine, put_out
from lab.virtual.fixed.ratio_sweep import SERVICE_A, SERVICE_B, RatioPoint, RatioService, peak, sweep
from simulator.profiles import find_profile, packaged_profiles

PROFILE = "h100-8b-tp1"
REPLICAS = 16


def shape_is_as_reported(points: Sequence[RatioPoint]) -> bool:
    """Whether the peak is inside, everything before it is bound by TTFT and everything after it by TBT."""
    best = points.index(peak(points))
    if not 0 < best < len(points) - 1:
        return False
    left, right = points[:best], points[best + 1 :]
    return all(point.bound == "TTFT" for point in left) and all(point.bound == "TBT" for point in right)


def study(service: RatioService, profile: str, replicas: int) -> dict[str, object]:
    """One service's sweep as a document."""
    known = find_profile(packaged_profiles(), profile)
    points = list(sweep(service, known, known, replicas=replicas))
    best = peak(points)
    return {
        "service": dataclasses.asdict(service),
        "points": [dataclasses.asdict(point) for point in points],
        "peak": {"prefill": best.prefill, "decode": best.decode, "goodput_rps": best.goodput_rps},
        "shape_as_reported": shape_is_as_reported(points),
    }


def run(profile: str, replicas: int) -> dict[str, object]:
    """Both sweeps as one document."""
    studies = [study(service, profile, replicas) for service in (SERVICE_A, SERVICE_B)]
    return {
        "bench": "ratios",
        "machine": machine(),
        "inputs": {"profile": profile, "replicas": replicas, "quantile": 0.9},
        "results": studies,
        "bars": [
            {
                "name": f"ratio_shape_{'ab'[index]}",
                "value": float(bool(one["shape_as_reported"])),
                "bar": 1.0,
                "ok": bool(one["shape_as_reported"]),
            }
            for index, one in enumerate(studies)
        ],
    }


def _print_table(report: Mapping[str, object]) -> None:
    studies = report["results"]
    for one in studies if isinstance(studies, list) else []:
        service = one["service"]
        print(
            f"service {service['name']}: {service['prompt_tokens']:.0f} in, {service['output_tokens']:.0f} out, "
            f"TTFT {service['ttft_s']:g} s, TBT {1000 * service['tbt_s']:g} ms"
        )
        print("   P:D    requests/s   TTFT P90 s   TBT P90 ms   bound")
        for point in one["points"]:
            mark = "  ← peak" if point["prefill"] == one["peak"]["prefill"] else ""
            print(
                f"{point['prefill']:4d}:{point['decode']:<4d}{point['goodput_rps']:11.2f}{point['ttft_s']:13.3f}"
                f"{1000 * point['tbt_s']:13.1f}   {point['bound']}{mark}"
            )


def main() -> int:
    """Print the tables; exit status 1 when a shape is not as the paper reports it."""
    parser = argparse.ArgumentParser(description="goodput by the ratio of prefill to decode replicas")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--profile", default=PROFILE, help=f"profile of both roles (default {PROFILE})")
    parser.add_argument("--replicas", type=int, default=REPLICAS, help=f"replicas to split (default {REPLICAS})")
    arguments = parser.parse_args()
    report = run(arguments.profile, arguments.replicas)
    return put_out(report, as_json=arguments.json, show=_print_table)


if __name__ == "__main__":
    sys.exit(main())
