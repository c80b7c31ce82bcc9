"""The diurnal suite: its day, its pressure test, and every contender on a short part of it."""

import dataclasses

import numpy as np
import pytest

from lab.baselines.interface import FleetView, RoleView
from lab.evaluation.catalogue import find_suite
from lab.evaluation.suite import Options, SuiteError
from lab.evaluation.summaries import Case
from lab.evaluation.tuning import read_tuned
from lab.suites import diurnal_setup as day
from lab.suites.diurnal import CONTENDERS, DECODE, PREFILL, TUNED_FILE, by_role, run_case
from lab.virtual.control import ServiceTraffic
from lab.virtual.scaled_control import ScaledLook
from trimtab.domain.role_signals import FrontDoor
from trimtab.domain.vocabulary import Role


def test_the_day_follows_its_curve_and_is_as_busy_as_the_pressure_test_allows() -> None:
    trace = day.requests_of_day(1, day.DURATION_S)
    arrivals = np.array([one.arrival_s for one in trace])
    assert (np.diff(arrivals) >= 0).all()
    hour_s = 3600 / day.COMPRESS
    per_hour = np.bincount((arrivals // hour_s).astype(int), minlength=24)
    assert per_hour.argmin() in (3, 4, 5)
    assert per_hour.max() / hour_s == pytest.approx(day.peak_rps(), rel=0.15)
    assert per_hour.max() / per_hour.min() == pytest.approx(1.7 / 0.3, rel=0.3)
    assert np.mean([one.prompt_tokens for one in trace]) == pytest.approx(3000, rel=0.02)


def test_a_unit_at_its_target_load_shows_what_the_targets_are() -> None:
    found = day.pressure_test()
    assert day.units_for(found.unit_rps * day.TARGET_LOAD * 2) == 2
    assert day.units_for(found.unit_rps * day.TARGET_LOAD * 2.01) == 3
    assert day.units_for(1e9) == day.MOST_UNITS
    assert found.decode_tps == pytest.approx(day.TARGET_LOAD * found.unit_rps * 349 / day.UNIT.decode, rel=0.1)
    assert 0 < found.prefill_requests < 5 < found.decode_requests
    target = day.service_policy().spec.proportional
    assert target is not None
    assert target.target_per_replica == pytest.approx(found.decode_tps)


@pytest.mark.parametrize(
    "name", ["static-mean", "hpa-custom", "kpa", "dynamo-load", "dynamo-sla", "periodic", "oracle", "trimtab"]
)
def test_every_contender_answers_every_request_within_its_bounds(name: str) -> None:
    result = run_case(300.0, Case(name, "day", 1))
    assert (result.policy, len(result.requests)) == (name, len(day.requests_of_day(1, 300.0)))
    assert result.requests.complete.all()
    most = {role.role.value: role.max_replicas for role in day.service_policy().spec.roles}
    assert all(1 <= point.desired <= most[point.role] for point in result.timeline)
    assert all(point.at_s >= 0 for point in result.timeline)
    if name.startswith("static"):
        assert result.transitions == 0
    if name.startswith("trimtab"):
        pairs = {(p.at_s, p.role): p.desired for p in result.timeline}
        units = {at_s: count for (at_s, role), count in pairs.items() if role == Role.DECODE.value}
        assert all(pairs[at_s, Role.PREFILL.value] == day.UNIT.prefill * count for at_s, count in units.items())


def test_what_dynamo_profiles_is_what_a_replica_does() -> None:
    prefill, decode = day.prefill_profile(), day.decode_profile()
    assert prefill.expected_ttft_s(3000) < day.SLO.ttft_s
    assert list(prefill.ttft_s) == sorted(prefill.ttft_s)
    found = day.pressure_test()
    needed = found.unit_rps / day.UNIT.prefill * 3000
    assert 0.9 * needed < prefill.replica_tps(3000) < 1.6 * needed, (
        "a unit's prefill replicas carry its rate, and not much more"
    )
    assert decode.best_tps(day.SLO.tpot_s, 3175) > found.decode_tps
    assert all(list(row) == sorted(row) for row in decode.itl_s)


def test_a_timetable_asks_for_what_the_curve_needs_by_the_time_that_a_replica_has_started() -> None:
    """Both roles at their ratio, from the valley at four to the peak at four in the afternoon."""
    contender = CONTENDERS["periodic"]
    controller = contender.make(contender.start, ())
    wanted = {}
    for hour in (0.0, 4.0, 8.0, 16.0, 23.0):
        at_s = hour * 3600 / day.COMPRESS
        look = ScaledLook(
            now_s=1000.0 + at_s,
            views={},
            front=FrontDoor(),
            names={Role.PREFILL: (), Role.DECODE: ()},
            routable=frozenset(),
            samples={},
            traffic=ServiceTraffic(interval_s=2.0, arrivals=0, prompt_tokens=0, output_tokens=0, held=0),
        )
        counts = controller.tick(look)
        assert counts[Role.PREFILL] == day.UNIT.prefill * counts[Role.DECODE]
        wanted[hour] = counts[Role.DECODE]
        highest_rps = max(day.rate_rps(at_s), day.rate_rps(at_s + contender.start["ahead_s"]))
        assert wanted[hour] == day.units_for(highest_rps)
    assert (wanted[4.0], wanted[16.0]) == (1, day.PEAK_UNITS)
    assert wanted[4.0] < wanted[0.0] < wanted[8.0] < wanted[16.0] > wanted[23.0]


def test_each_role_has_a_scaler_of_its_own() -> None:
    tick = by_role({PREFILL: lambda view: {view.roles[0].key: 3}, DECODE: lambda view: {view.roles[0].key: 5}})
    view = FleetView(now_s=0.0, roles=tuple(RoleView(key=key, replicas=(), desired=1) for key in (PREFILL, DECODE)))
    assert tick(view) == {PREFILL: 3, DECODE: 5}


def test_the_suite_takes_a_part_of_the_day_and_no_less_than_five_minutes() -> None:
    suite = find_suite("diurnal", Options(duration_s=600.0))
    assert set(suite.tunings) == {name for name, contender in CONTENDERS.items() if contender.space}
    assert all(set(one.space) == set(one.start) for one in suite.tunings.values())
    assert all(len(one.seeds) > 1 and one.in_two_stages for one in suite.tunings.values())
    tuned = read_tuned(TUNED_FILE)
    for name, contender in CONTENDERS.items():
        said = "tuned on 2 seeds" if name in tuned else "not tuned" if contender.space else contender.about
        assert suite.policies[name].endswith(said), name
    assert suite.inputs["settings"] == {
        name: dict(tuned[name].setting if name in tuned else contender.start) for name, contender in CONTENDERS.items()
    }
    assert all(dataclasses.asdict(slo) == {"ttft_s": 1.0, "tpot_s": 0.04} for slo in suite.slos.values())
    with pytest.raises(SuiteError, match="--duration must be 300 to 7200 s, not 60"):
        find_suite("diurnal", Options(duration_s=60.0))
