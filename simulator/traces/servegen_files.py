"""ServeGen's files: clients with their windows and length histograms. Bounded in size; errors name file and line.

| file | what |
|---|---|
| `chunk-N-trace.csv` | a client: `start_s,rate_rps,cv,Gamma or Weibull or nothing,shape,scale`, no header |
| `chunk-N-dataset.json` | its lengths: `{"start_s": {"input_tokens": "{tokens: share, …}", "output_tokens": …}}` |
| `*_clients.npz` | many clients' windows in arrays: `client`, `t_s`, `rate_rps`, `pattern`, `p1` (shape) |
| `*_hist.csv` | lengths of all clients together: `lo,hi,prob` |

A dataset's first entry is used for the whole client: lengths that shift over days are not averaged.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from simulator.traces.lengths import LengthLaw, Table
from simulator.traces.model import TraceError
from simulator.traces.servegen import WINDOW_S, Client, Pattern, Window

MAX_FILE_BYTES = 64 * 1024**2
MAX_WINDOWS = 100_000
MAX_CLIENTS = 10_000
_PATTERNS = {"": Pattern.NONE, "Gamma": Pattern.GAMMA, "Weibull": Pattern.WEIBULL}
_TRACE_NAME = re.compile(r"chunk-(\d+)-trace\.csv")
_ARRAYS = ("client", "t_s", "rate_rps", "pattern", "p1")


@dataclasses.dataclass(frozen=True, slots=True)
class DefaultLengths:
    """Lengths of clients whose own are not available."""

    prompt: LengthLaw
    output: LengthLaw


def read_clients(folder: Path, *, default: DefaultLengths | None = None) -> Iterator[Client]:
    """The clients of a folder of ServeGen's chunks, one at a time, by number.

    A client without a dataset file gets `default`. Raises `TraceError`, also where there is neither.
    """
    found = sorted((int(match[1]), path) for path in _listed(folder) if (match := _TRACE_NAME.fullmatch(path.name)))
    if not found:
        raise TraceError(f"{folder}: holds no chunk-N-trace.csv")
    if len(found) > MAX_CLIENTS:
        raise TraceError(f"{folder}: {len(found)} clients; at most {MAX_CLIENTS} are read")
    for number, path in found:
        windows = _read_windows(path)
        dataset = folder / f"chunk-{number}-dataset.json"
        if dataset.exists():
            lengths = _read_dataset(dataset)
        elif default is not None:
            lengths = default
        else:
            raise TraceError(f"{dataset}: is missing, and no other lengths are given")
        yield Client(
            name=f"chunk-{number}",
            windows=windows,
            window_s=_window_s(windows),
            prompt=lengths.prompt,
            output=lengths.output,
        )


def read_packed_clients(path: Path, lengths: DefaultLengths) -> Iterator[Client]:
    """The clients of a packed file, one at a time; all get `lengths`. Raises `TraceError`."""
    _check_size(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in _ARRAYS if name not in file]
            if missing:
                raise TraceError(f"{path}: has no array {', '.join(missing)}")
            names, starts, rates, patterns, shapes = (np.asarray(file[name]) for name in _ARRAYS)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise TraceError(f"{path}: not a packed file of clients: {error}") from None
    shape = (len(names), len(starts))
    if any(array.shape != shape for array in (rates, patterns, shapes)):
        raise TraceError(f"{path}: the arrays do not all have {shape[0]} clients and {shape[1]} windows")
    if shape[0] > MAX_CLIENTS or not 1 <= shape[1] <= MAX_WINDOWS:
        raise TraceError(f"{path}: {shape[0]} clients and {shape[1]} windows; at most {MAX_CLIENTS} and {MAX_WINDOWS}")
    for row, name in enumerate(names.tolist()):
        try:
            windows = tuple(
                Window(float(start_s), float(rate), Pattern(int(pattern)), float(gap) if pattern else 1.0)
                for start_s, rate, pattern, gap in zip(
                    starts.tolist(), rates[row].tolist(), patterns[row].tolist(), shapes[row].tolist(), strict=True
                )
            )
            yield Client(
                name=f"client-{name}",
                windows=windows,
                window_s=_window_s(windows),
                prompt=lengths.prompt,
                output=lengths.output,
            )
        except ValueError as error:
            raise TraceError(f"{path}: client {name}: {error}") from None


def read_histogram(path: Path) -> Table:
    """A table of lengths from a `lo,hi,prob` file. Raises `TraceError`."""
    low, high, weight = [], [], []
    for number, text in _text_lines(path):
        if number == 1:
            if text.split(",") != ["lo", "hi", "prob"]:
                raise TraceError(f"{path}: line 1: the header must be lo,hi,prob, not {text[:60]!r}")
            continue
        cells = text.split(",")
        try:
            low.append(int(cells[0]))
            high.append(int(cells[1]))
            weight.append(float(cells[2]))
        except (ValueError, IndexError):
            raise TraceError(f"{path}: line {number}: {text[:60]!r} is no lo,hi,prob") from None
    try:
        return Table(tuple(low), tuple(high), tuple(weight))
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise TraceError(f"{folder}: {error.strerror or error}") from None


def _check_size(path: Path) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    if size > MAX_FILE_BYTES:
        raise TraceError(f"{path}: {size} bytes; at most {MAX_FILE_BYTES} are read")


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    _check_size(path)
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.strip()
    except UnicodeDecodeError:
        raise TraceError(f"{path}: is not UTF-8 text") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def _window_s(windows: tuple[Window, ...]) -> float:
    return windows[1].start_s - windows[0].start_s if len(windows) > 1 else WINDOW_S


def _read_windows(path: Path) -> tuple[Window, ...]:
    windows: list[Window] = []
    for number, text in _text_lines(path):
        cells = [cell.strip() for cell in text.split(",")]
        if len(cells) != 6 or cells[3] not in _PATTERNS:
            raise TraceError(f"{path}: line {number}: {text[:60]!r} is no start_s,rate,cv,Gamma|Weibull|,shape,scale")
        if len(windows) >= MAX_WINDOWS:
            raise TraceError(f"{path}: line {number}: more than {MAX_WINDOWS} windows")
        pattern = _PATTERNS[cells[3]]
        try:
            start_s = float(cells[0])
            window = Window(start_s, float(cells[1]), pattern, float(cells[4]) if pattern is not Pattern.NONE else 1.0)
        except ValueError as error:
            raise TraceError(f"{path}: line {number}: {error}") from None
        if not math.isfinite(start_s) or start_s < 0 or (windows and start_s <= windows[-1].start_s):
            raise TraceError(f"{path}: line {number}: windows go forward from 0, not to {cells[0]} s")
        windows.append(window)
    if not windows:
        raise TraceError(f"{path}: the file is empty")
    return tuple(windows)


def _read_dataset(path: Path) -> DefaultLengths:
    _check_size(path)
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict) or not document:
        raise TraceError(f"{path}: must hold one mapping of windows")
    window, fields = next(iter(document.items()))
    if not isinstance(fields, dict):
        raise TraceError(f"{path}: window {window}: must hold a mapping of fields")
    return DefaultLengths(
        _lengths(path, window, "input_tokens", fields), _lengths(path, window, "output_tokens", fields)
    )


def _lengths(path: Path, window: str, field: str, fields: dict[str, object]) -> Table:
    """A text such as `{224: 0.1, 225: 0.9}`: whole numbers as keys, so not JSON."""
    text = fields.get(field)
    place = f"{path}: window {window}: {field}"
    if not isinstance(text, str):
        raise TraceError(f"{place} must be a text of token counts and shares")
    shares: dict[int, float] = {}
    try:
        for pair in text.strip().removeprefix("{").removesuffix("}").split(","):
            tokens, share = pair.split(":")
            shares[int(tokens)] = float(share)
        ordered = sorted(shares)
        return Table(tuple(ordered), tuple(t + 1 for t in ordered), tuple(shares[t] for t in ordered))
    except ValueError as error:
        raise TraceError(f"{place}: {error}") from None
