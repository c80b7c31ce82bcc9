"""Recorded windows from a file: CSV with a header, or one JSON object a line (`.jsonl`).

Columns, one row a window of one service, or of a stage of it, at fixed capacity, in order of time within each run:

    window_end_s              seconds on any clock
    prefill_tps, decode_tps   tokens per second over all replicas
    running, waiting          mean requests over all replicas; waiting with what gateways hold
    ttft_p95_s, tpot_p95_s    95th percentiles of the requests that arrived in the window
    role                      optional: prefill or decode, for the stages of a disaggregated service
    run                       optional: a name for each unbroken run, such as the trace
    kv_usage_ratio            optional, from 0 to 1
    request_rps               optional: finished requests per second; without it a waiting request has a fixed weight
    slo_attainment            optional: share of the arrived requests within the SLO; else 1 or 0 by the percentiles
    requests                  optional: how many arrived

Latencies are left empty where nothing arrived. Those of a stage count from a request's arrival at the stage: of prefill
the TTFT alone judges; of decode the TPOT, and the TTFT where it is given. Other columns are ignored. Nothing is
guessed: a row with a value that is no number, negative, not finite or absurdly large is refused with its line.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from lab.calibration.fitting import CalibrationError
from lab.calibration.watching import stage_pressures
from lab.calibration.windows import Windows
from lab.evaluation.statistics import Slo
from trimtab.domain.vocabulary import Role

NEEDED = ("window_end_s", "prefill_tps", "decode_tps", "running", "waiting")
LATENCIES = ("ttft_p95_s", "tpot_p95_s")
OPTIONAL = ("kv_usage_ratio", "request_rps", "slo_attainment", "requests")
RATIOS = ("kv_usage_ratio", "slo_attainment")
RUN = "run"
ROLE = "role"
ROLES = (Role.COLOCATED, Role.PREFILL, Role.DECODE)
MAX_ROWS = 1_000_000
MAX_NUMBER = 1e15
"""Above any clock's milliseconds, and far below where sums and products overflow."""

Row = Mapping[str, object]


def read_observations(path: Path, slo: Slo) -> dict[Role, Windows]:
    """The windows of a file by role, judged by `slo`: of a colocated service, or of one or both stages.

    Raises `CalibrationError` with the file and the line.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(_numbered(file, path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is not text in UTF-8"
        raise CalibrationError(f"{path}: {reason}") from None
    if not rows:
        raise CalibrationError(f"{path}: no window in it")
    by_role: dict[Role, list[tuple[int, Row]]] = {}
    for line, row in rows:
        by_role.setdefault(_role(row.get(ROLE), f"{path}:{line}: {ROLE}"), []).append((line, row))
    if Role.COLOCATED in by_role and len(by_role) > 1:
        line = by_role[Role.COLOCATED][0][0]
        raise CalibrationError(f"{path}:{line}: {ROLE}: is not prefill or decode, as that of other rows")
    return {role: _windows(by_role[role], path, slo, role) for role in ROLES if role in by_role}


def _role(value: object, place: str) -> Role:
    """A row's role; colocated where it is left out."""
    if value is None or value == "":
        return Role.COLOCATED
    try:
        role = Role(str(value))
    except ValueError:
        role = None
    if role not in ROLES:
        raise CalibrationError(f"{place}: {str(value)[:40]!r} is not one of {', '.join(ROLES)}")
    return role


def _numbered(lines: Iterable[str], path: Path) -> Iterator[tuple[int, Row]]:
    for count, (line, row) in enumerate(_json_rows(lines, path) if path.suffix == ".jsonl" else _csv_rows(lines, path)):
        if count >= MAX_ROWS:
            raise CalibrationError(f"{path}: more than {MAX_ROWS:,} rows")
        yield line, row


def _csv_rows(lines: Iterable[str], path: Path) -> Iterator[tuple[int, Row]]:
    reader = csv.DictReader(lines, strict=True)
    names = list(reader.fieldnames or ())
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise CalibrationError(f"{path}:1: column {twice} {names.count(twice)} times; keep the one that is meant")
    missing = [name for name in (*NEEDED, *LATENCIES) if name not in names]
    if missing:
        raise CalibrationError(f"{path}:1: no column {missing[0]}; needed are {', '.join((*NEEDED, *LATENCIES))}")
    try:
        for row in reader:
            if None in row or None in row.values():
                raise CalibrationError(f"{path}:{reader.line_num}: not as many fields as the header has")
            yield reader.line_num, row
    except csv.Error as error:
        raise CalibrationError(f"{path}:{reader.line_num}: {error}") from None


def _json_rows(lines: Iterable[str], path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row: object = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise CalibrationError(f"{path}:{number}: not a JSON object")
        missing = [name for name in NEEDED if name not in row]
        if missing:
            raise CalibrationError(f"{path}:{number}: no {missing[0]}")
        yield number, row


def _windows(rows: list[tuple[int, Row]], path: Path, slo: Slo, role: Role) -> Windows:
    runs: dict[str, int] = {}
    names = (*NEEDED, *LATENCIES, *OPTIONAL)
    columns: dict[str, list[float]] = {name: [] for name in names}
    numbers: list[int] = []
    last_s: dict[int, float] = {}
    for line, row in rows:
        for name in names:
            value = _number(row.get(name), f"{path}:{line}: {name}", needed=name in NEEDED)
            if name in RATIOS and value > 1:
                raise CalibrationError(f"{path}:{line}: {name}: {value:g} is not from 0 to 1")
            columns[name].append(value)
        run = runs.setdefault(str(row.get(RUN) or ""), len(runs))
        numbers.append(run)
        end_s = columns["window_end_s"][-1]
        if end_s <= last_s.get(run, -math.inf):
            raise CalibrationError(f"{path}:{line}: window_end_s: {end_s:g} does not come after the window before it")
        last_s[run] = end_s
    found = {name: np.array(values) for name, values in columns.items()}
    pressure = stage_pressures(role, found["ttft_p95_s"], found["tpot_p95_s"], slo)
    attained = np.where(np.isnan(found["slo_attainment"]), (pressure <= 1.0).astype(float), found["slo_attainment"])
    order = np.argsort(numbers, kind="stable")
    windows = Windows(
        run=np.array(numbers, dtype=np.int64),
        end_s=found["window_end_s"],
        **{name: found[name] for name in ("prefill_tps", "decode_tps", "running", "waiting")},
        kv_usage_ratio=found["kv_usage_ratio"],
        request_rps=found["request_rps"],
        pressure=pressure,
        attained=np.where(np.isnan(pressure), np.nan, attained),
        requests=np.where(np.isnan(found["requests"]), 1.0, found["requests"]),
    )
    return windows.take(order)


def _number(value: object, place: str, *, needed: bool) -> float:
    """A cell's number; NaN for an empty one that need not be there."""
    if value is None or value == "":
        if needed:
            raise CalibrationError(f"{place}: is empty")
        return math.nan
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise CalibrationError(f"{place}: {str(value)[:40]!r} is not a number of at least 0")
    if number > MAX_NUMBER:
        raise CalibrationError(
            f"{place}: {number:g} is more than any recording holds; give it in the unit of the column"
        )
    return number
