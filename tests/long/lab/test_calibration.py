"""Calibration on simulated servers, from the sweep to the share: each stage of a service, and a service as a whole."""

import pytest

from lab.calibration.calibrating import calibrate_profile, calibrate_stages
from lab.calibration.report import roles_block
from lab.calibration.stagesweeps import STAGES
from lab.calibration.sweeps import Sweep
from simulator.profiles import packaged_profiles
from tests.unit.lab.calibration.test_stages import DATE, PROFILE, SLO, policy_of
from trimtab.domain.vocabulary import Role


def test_the_simulator_fits_a_profile_that_ranks_what_it_never_saw_better_than_any_raw_signal() -> None:
    sweep = Sweep(replicas=(1,), duration_s=225.0, repeats=1)
    found = calibrate_profile(packaged_profiles()["a100-7b-tp1"], SLO, sweep)
    chosen = found.chosen
    assert chosen.judged.spearman is not None
    assert chosen.judged.spearman > 0.9
    assert chosen.judged.spearman > max(raw.spearman or 0 for raw in found.raw.values())
    assert (chosen.share.capacity_decode_tps or 0) > 1000
    assert found.source.startswith("simulator, profile a100-7b-tp1")


@pytest.mark.timeout(600)
def test_the_simulator_calibrates_both_stages_from_end_to_end() -> None:
    profile = packaged_profiles()[PROFILE]
    found = calibrate_stages(profile, profile, SLO, Sweep(replicas=(1,), duration_s=180.0, repeats=1, search_s=30.0))
    assert list(found) == [Role.PREFILL, Role.DECODE]
    policy = policy_of(roles_block(found, DATE))
    for role, calibration in found.items():
        chosen = calibration.chosen
        assert policy.share_profile(role) == chosen.share
        assert chosen.judged.spearman is not None
        assert chosen.judged.spearman > 0.8
        assert f"profile {PROFILE} of {profile.timing.source.date} as {role}" in calibration.source
    prefill, decode = (found[role].chosen.share for role in STAGES)
    assert (prefill.capacity_prefill_tps or 0) > 5000
    assert (decode.capacity_decode_tps or 0) > 1000
    assert (prefill.capacity_decode_tps, decode.capacity_prefill_tps) == (None, None)
