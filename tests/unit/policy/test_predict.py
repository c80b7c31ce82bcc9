"""What Z is expected to be after a transfer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_engine.core.pool.load import Load
from policy_engine.core.pool.predict import (
    POWER,
    Elasticity,
    await_effect,
    capacity_z,
    congestion,
    learn,
    power_z,
    z_after,
)
from trimtab.config.poolrules import PoolRules
from trimtab.config.specs import Slo, TokenServiceShare

SLO = Slo(ttft_s=2, tpot_s=0.08)


def test_a_lone_request_is_faster_than_the_slo_by_the_profile():
    assert congestion(TokenServiceShare(theta_tps=20, base_tpot_s=0.02), SLO) == pytest.approx(0.75)
    assert congestion(TokenServiceShare(theta_tps=20), SLO) == pytest.approx(0.75), "four times, where nothing is said"
    assert congestion(TokenServiceShare(theta_tps=20, base_tpot_s=0.09), SLO) == 0.0


def test_far_from_saturation_a_release_costs_little():
    """Two replicas at ρ = 0.2 serve at 85 % of a lone request's speed, one at 0.4 serves at 70 %."""
    load = Load(0.4, 0.0, 2)
    assert capacity_z(1.8, load, after=1, lost_at_capacity=0.75) == pytest.approx(1.8 * 0.7 / 0.85)
    arguments = {"replicas": 2, "after": 1, "load": load, "exponent": 2.0, "lost_at_capacity": 0.75}
    assert z_after(PoolRules(prediction="capacity"), 1.8, **arguments) == pytest.approx(1.8 * 0.7 / 0.85)
    assert z_after(PoolRules(prediction="power"), 1.8, **arguments) == pytest.approx(1.8 * 0.5**1.5)
    assert z_after(PoolRules(prediction="elasticity"), 1.8, **arguments) == pytest.approx(1.8 * 0.25)
    assert z_after(PoolRules(prediction="none"), 1.8, **arguments) == 1.8
    assert z_after(PoolRules(prediction="none"), 1.8, **{**arguments, "after": 0}) == 0.0
    unknown = {**arguments, "load": None}
    assert z_after(PoolRules(prediction="capacity"), 1.8, **unknown) == pytest.approx(1.8 * 0.5**1.5)


@given(
    z=st.floats(0.01, 10),
    work=st.floats(0, 100),
    replicas=st.integers(1, 20),
    given_up=st.integers(1, 20),
    exponent=st.floats(0.5, 3),
    congested=st.floats(0, 0.99),
    prediction=st.sampled_from(["power", "elasticity", "capacity", "none"]),
)
def test_less_is_never_predicted_to_be_better(z, work, replicas, given_up, exponent, congested, prediction):
    rules = PoolRules(prediction=prediction)
    load = Load(work, 0.0, replicas)
    told = {"replicas": replicas, "load": load, "exponent": exponent, "lost_at_capacity": congested}
    fewer = z_after(rules, z, after=max(0, replicas - given_up), **told)
    more = z_after(rules, z, after=replicas + given_up, **told)
    assert 0 <= fewer <= z * (1 + 1e-9)
    assert more >= z * (1 - 1e-9)


def test_the_exponent_is_learnt_from_own_transfers():
    before = await_effect(Elasticity(), replicas=2, z=0.5, load=Load(2.0, 0.0, 2))
    # Z doubled with three replicas instead of two: an exponent of 1.71, of which three tenths are taken over.
    after = learn(before, replicas=3, z=1.0, load=Load(2.2, 0.0, 3))
    assert after.exponent == pytest.approx(POWER + 0.3 * (1.7095 - POWER), abs=1e-4)
    assert after.before_replicas is None, "each transfer teaches once"
    assert learn(after, replicas=4, z=3.0, load=None) == after


@pytest.mark.parametrize(
    ("replicas", "z", "load"),
    [
        (2, 1.0, Load(2.0, 0.0, 2)),  # rolled back
        (3, None, Load(2.0, 0.0, 3)),  # nothing to see
        (3, 1.0, Load(4.0, 0.0, 3)),  # twice the arrivals
        (3, 1.0, None),
    ],
)
def test_nothing_is_learnt_from_what_a_transfer_did_not_do(replicas, z, load):
    before = await_effect(Elasticity(), replicas=2, z=0.5, load=Load(2.0, 0.0, 2))
    assert learn(before, replicas=replicas, z=z, load=load) == Elasticity()


def test_an_exponent_stays_within_reason():
    memory = Elasticity()
    for _ in range(50):
        memory = learn(await_effect(memory, replicas=2, z=0.01, load=None), replicas=3, z=100.0, load=None)
    assert memory.exponent == pytest.approx(3.0, abs=1e-3)
    assert power_z(2.0, replicas=2, after=0) == 0.0
