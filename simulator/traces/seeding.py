"""Random generators by name: equal seeds and names give equal numbers, whatever else is drawn."""

from __future__ import annotations

import hashlib

import numpy as np

MAX_SEED = 2**63 - 1


def generator(seed: int, *names: str) -> np.random.Generator:
    """A generator of its own for `names`, from outer to inner. Raises ValueError for an impossible seed."""
    if isinstance(seed, bool) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"a seed is a whole number from 0 to {MAX_SEED}, not {seed!r}")
    # The separator is in no name, so that ("a", "bc") and ("ab", "c") differ.
    digest = hashlib.sha256("\x1f".join(names).encode()).digest()
    words = np.frombuffer(digest, dtype="<u4").tolist()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *words])))
