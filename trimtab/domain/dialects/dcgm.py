"""The page of a GPU exporter (DCGM exporter): utilisation, memory and power of each GPU of a node.

A page is one node's. Of its hundred families seven are read, and of their labels two: ``gpu``, the index that
replicas are placed by, and ``GPU_I_ID``. A series with the latter describes an instance of a partitioned GPU (MIG); a
replica is placed on whole GPUs, so instances are left out, and a partitioned GPU has only the values of its own series.

Where a GPU is shared between pods the exporter repeats its series with other labels: equal numbers count once,
different ones are refused. A number that is not finite, negative or absurd is refused too; DCGM writes a field that
it could not read as a very large number. Refused and absent values are NaN in a reading, and nowhere else.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

MAX_GPU_INDEX = 1023
_MAX_POWER_W = 10_000.0
_MAX_MEMORY_MIB = float(16 * 1024 * 1024)


class _Family(NamedTuple):
    """One field of DCGM: its largest plausible number, and its unit in ours."""

    name: bytes
    most: float
    scale: float = 1.0


_UTILISATION = _Family(b"DCGM_FI_DEV_GPU_UTIL", 100.0, 0.01)
_ENGINE_ACTIVE = _Family(b"DCGM_FI_PROF_GR_ENGINE_ACTIVE", 1.0)
_SM_ACTIVE = _Family(b"DCGM_FI_PROF_SM_ACTIVE", 1.0)
_POWER = _Family(b"DCGM_FI_DEV_POWER_USAGE", _MAX_POWER_W)
_USED = _Family(b"DCGM_FI_DEV_FB_USED", _MAX_MEMORY_MIB)
_FREE = _Family(b"DCGM_FI_DEV_FB_FREE", _MAX_MEMORY_MIB)
_RESERVED = _Family(b"DCGM_FI_DEV_FB_RESERVED", _MAX_MEMORY_MIB)
_FAMILIES = (_UTILISATION, _ENGINE_ACTIVE, _SM_ACTIVE, _POWER, _USED, _FREE, _RESERVED)

_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"[, ]*')
_NUMBER = re.compile(rb"[0-9]{1,4}")


class GpuPageError(ValueError):
    """A page is refused as a whole; the message is one line."""


class GpuValues(NamedTuple):
    """One GPU at one moment; NaN where absent. Ratios go from 0 to 1.

    ``utilisation_ratio`` is the share of time in which a kernel ran, ``sm_activity_ratio`` the share of streaming
    multiprocessors that had work, ``memory_ratio`` the framebuffer in use over the framebuffer there is.
    """

    utilisation_ratio: float
    sm_activity_ratio: float
    power_w: float
    memory_ratio: float


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One page: the GPUs of a node by index. ``rejected`` counts the numbers that were refused."""

    gpus: Mapping[int, GpuValues]
    rejected: int = 0


def read_gpu_page(page: bytes) -> GpuReading:
    """Parse a page of the exporter. Raises ``GpuPageError`` when it names no GPU in any family read here.

    The format is the exporter's: a sample's name at the beginning of its line, its labels right after it, its value
    after one space.
    """
    text = b"\n" + page
    found: dict[_Family, dict[int, float]] = {}
    rejected = 0
    for family in _FAMILIES:
        found[family], refused = _read_family(text, family)
        rejected += refused
    indices = sorted(set().union(*found.values()))
    if not indices:
        raise GpuPageError("no GPU on the page: none of the families of DCGM that are read, with a label gpu")
    return GpuReading(MappingProxyType({index: _values(found, index) for index in indices}), rejected)


class GpuMemory(NamedTuple):
    """The framebuffer of one GPU in GiB: in use, and all there is."""

    used_gib: float
    total_gib: float


def read_gpu_memory(page: bytes) -> dict[int, GpuMemory]:
    """GPU index → its memory, for the GPUs whose used and free memory the page has.

    A GPU whose memory was not measured, or was refused, is left out: it does not count as free.
    """
    found = {family: _read_family(b"\n" + page, family)[0] for family in (_USED, _FREE, _RESERVED)}
    memory: dict[int, GpuMemory] = {}
    for index in sorted(found[_USED]):
        used_mib, total_mib = _memory_mib(found, index)
        if math.isfinite(total_mib):
            memory[index] = GpuMemory(used_mib / 1024, total_mib / 1024)
    return memory


def _read_family(text: bytes, family: _Family) -> tuple[dict[int, float], int]:
    """(GPU → number in our unit, NaN where refused; how many were refused)."""
    needle = b"\n" + family.name + b"{"
    found: dict[int, float] = {}
    refused: set[int] = set()
    start = text.find(needle)
    while start >= 0:
        start += len(needle)
        end = text.find(b"\n", start)
        end = len(text) if end < 0 else end
        close = text.rfind(b"}", start, end)
        index = _gpu_index(text[start:close]) if close >= 0 else None
        if index is not None:
            number = _number(text[close + 1 : end], family.most) * family.scale
            if found.setdefault(index, number) != number or math.isnan(number):
                refused.add(index)
        # The newline that ends this line begins the next one.
        start = text.find(needle, end)
    for index in refused:
        found[index] = math.nan
    return found, len(refused)


@lru_cache(maxsize=65_536)
def _gpu_index(labels: bytes) -> int | None:
    """The whole GPU that a series is about; None for an instance of one and for what is no GPU.

    A node writes the same labels for a GPU in every family and on every page.
    """
    named = dict(_LABEL.findall(labels))
    index = named.get(b"gpu", b"")
    if named.get(b"GPU_I_ID") or _NUMBER.fullmatch(index) is None:
        return None
    return int(index) if int(index) <= MAX_GPU_INDEX else None


def _number(text: bytes, most: float) -> float:
    """A sample's value; NaN when it is none, or not between 0 and ``most``."""
    try:
        number = float(text.split(None, 1)[0])
    except (ValueError, IndexError):
        return math.nan
    return number if 0 <= number <= most else math.nan


def _values(found: Mapping[_Family, Mapping[int, float]], index: int) -> GpuValues:
    def of(family: _Family) -> float:
        return found[family].get(index, math.nan)

    utilisation = of(_UTILISATION)
    used_mib, total_mib = _memory_mib(found, index)
    return GpuValues(
        # A partitioned GPU has no utilisation; the profiler's counter measures the same for the whole GPU.
        utilisation_ratio=of(_ENGINE_ACTIVE) if math.isnan(utilisation) else utilisation,
        sm_activity_ratio=of(_SM_ACTIVE),
        power_w=of(_POWER),
        memory_ratio=used_mib / total_mib if total_mib > 0 else math.nan,
    )


def _memory_mib(found: Mapping[_Family, Mapping[int, float]], index: int) -> tuple[float, float]:
    """(used, all there is); NaN where one of its parts was refused or is not there."""
    used_mib = found[_USED].get(index, math.nan)
    # Older exporters do not show what the driver keeps for itself; a number that was refused is another matter.
    return used_mib, used_mib + found[_FREE].get(index, math.nan) + found[_RESERVED].get(index, 0.0)
