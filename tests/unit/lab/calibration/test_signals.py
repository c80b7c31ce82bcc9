"""What all raw signals together say of health, from the windows that are most alike."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.calibration.ranks import spearman
from lab.calibration.signals import NEIGHBOURS, all_together
from lab.calibration.windows import Floats, Windows

COUNT = 400


def windows(seed: int, count: int = COUNT) -> Windows:
    """Health that no signal tells alone: tokens and requests vary each for themselves, their ratio decides."""
    random = np.random.default_rng(seed)
    running = random.uniform(2.0, 40.0, count)
    decode_tps = random.uniform(200.0, 2000.0, count)
    same = np.ones(count)
    return Windows(
        run=np.zeros(count, dtype=np.int64),
        end_s=5.0 * np.arange(1, count + 1),
        prefill_tps=same,
        decode_tps=decode_tps,
        running=running,
        waiting=0.0 * same,
        kv_usage_ratio=0.5 * same,
        request_rps=same,
        pressure=running / decode_tps * 20.0,
        attained=same,
        requests=same,
    )


def rank(values: Floats, health: Floats) -> float:
    found = spearman(values, health)
    assert found is not None
    return found


def test_together_signals_tell_what_each_alone_does_not() -> None:
    known, asked = windows(1), windows(2)
    found = rank(all_together(known, asked), asked.health)
    assert found > 0.95
    assert found > max(abs(rank(asked.running, asked.health)), abs(rank(asked.decode_tps, asked.health))) + 0.1
    # Of windows whose health has nothing to do with their signals nothing is learnt.
    shuffled = dataclasses.replace(known, pressure=np.random.default_rng(3).permutation(known.pressure))
    assert abs(rank(all_together(shuffled, asked), asked.health)) < 0.6


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 2 * NEIGHBOURS), st.floats(0.1, 10.0))
def test_an_answer_lies_among_what_is_known_and_does_not_depend_on_units(seed: int, count: int, unit: float) -> None:
    known, asked = windows(seed, count), windows(seed + 1, 50)
    found = all_together(known, asked)
    assert len(found) == len(asked)
    assert (found >= known.health.min() * (1 - 1e-9)).all()
    assert (found <= known.health.max() * (1 + 1e-9)).all()
    scaled = [dataclasses.replace(one, decode_tps=one.decode_tps * unit) for one in (known, asked)]
    assert all_together(*scaled) == pytest.approx(found)
    if count <= NEIGHBOURS:
        assert found == pytest.approx(float(np.exp(np.log(known.health).mean())))
