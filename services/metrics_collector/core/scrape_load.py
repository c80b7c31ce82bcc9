"""A server's own count of its open requests: ``GET /load``, which goes on counting where gauges are frozen."""

import json
import math

_LARGEST = 1e6


def read_load(body: bytes | None) -> float | None:
    """``{"server_load": n}`` → n. None for anything else: most servers do not count, and then nothing is known."""
    if body is None:
        return None
    try:
        document: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    load = document.get("server_load") if isinstance(document, dict) else None
    if isinstance(load, bool) or not isinstance(load, int | float) or not math.isfinite(load):
        return None
    return float(load) if 0 <= load <= _LARGEST else None
