"""Hypothesis: what no input may break, and replay under two hash seeds."""

import os
import random
import subprocess
import sys
from dataclasses import replace

from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from policy_engine.core.decision import RecordHeader, run_core, same
from policy_engine.core.pool.decide import PoolInput, PoolState, decide_pool
from policy_engine.core.pool.initial_layout import LayoutInput, lay_out
from policy_engine.core.scaled.decide import RoleReplicas, ScaledInput, ScaledState, decide_scaled
from policy_engine.core.scaled.units import shape_of, unit_bounds
from policy_engine.core.shared.vocabulary import DecisionKind, MemberKey
from policy_engine.shell.replay import decode_input, encode_input, record_of, replay
from tests.support.properties import costly
from tests.unit.policy.initial_layouts import born, facts
from trimtab.api.policy.v1 import decision_pb2
from trimtab.config.resources import Pool, ServicePolicy
from trimtab.domain.measurement import Measurement
from trimtab.domain.role_signals import FrontDoor, RoleSignals
from trimtab.domain.vocabulary import Quality, Role

NOW = 50_000.0


# Windows come from a seeded generator: drawing each of their numbers from Hypothesis takes a hundred times as long.


def some_signal(rng, high=20_000.0):
    quality = rng.choice([Quality.OK, Quality.OK, Quality.OK, *Quality])
    if quality in (Quality.MISSING, Quality.STALE):
        return Measurement(None, quality)
    expected = rng.randint(1, 40)
    reported = rng.randint(1, expected) if quality == Quality.PARTIAL else expected
    return Measurement(rng.choice([0.0, rng.uniform(0, high), rng.uniform(0, high / 100)]), quality, reported, expected)


def some_view(rng, role, now_s):
    if rng.random() < 0.4:
        quiet = Measurement(0.0, Quality.OK)
        return RoleSignals(
            role=role,
            window_end_s=now_s,
            prefill_tps=quiet,
            decode_tps=quiet,
            request_rps=quiet,
            running=quiet,
            waiting=quiet,
        )
    return RoleSignals(
        role=role,
        window_end_s=now_s - rng.choice([0.0, 0.0, 1.0, 100.0]),
        prefill_tps=some_signal(rng),
        decode_tps=some_signal(rng),
        request_rps=some_signal(rng, 100),
        running=some_signal(rng, 500),
        waiting=some_signal(rng, 500),
        kv_usage_ratio=some_signal(rng, 1),
        ttft_p95_s=some_signal(rng, 30),
        tpot_p95_s=some_signal(rng, 3),
        tbt_p95_s=some_signal(rng, 3),
    )


seeds = st.integers(0, 2**32).map(random.Random)


@st.composite
def scaled_policies(draw):
    low, extra = draw(st.integers(0, 6)), draw(st.integers(1, 40))
    disaggregated = draw(st.booleans())
    ratio = None
    roles = ("colocated",)
    if disaggregated:
        roles = ("prefill", "decode")
        ratio = {
            "prefill": draw(st.integers(1, 5)),
            "decode": draw(st.integers(1, 6)),
            "strict": draw(st.booleans()),
        }
    spec = {
        "model": "m",
        "slo": {"ttftS": 1, "tpotS": 1},
        "roles": [{"role": role, "minReplicas": low, "maxReplicas": low + extra + 6} for role in roles],
        "proportional": {
            "targetPerReplica": draw(st.floats(1, 1000)),
            "maxStepUnits": draw(st.integers(0, 4)),
            "scaleOutCoolingS": draw(st.sampled_from([0.0, 15.0])),
            "scaleInCoolingS": draw(st.sampled_from([0.0, 20.0])),
            "stabilizationWindowS": draw(st.sampled_from([0.0, 30.0])),
        },
        "ratio": ratio,
        "latencyBrake": draw(st.sampled_from([None, {"ttftTargetS": 1.0}])),
    }
    return ServicePolicy.model_validate({"metadata": {"name": "chat"}, "spec": spec})


@costly(max_examples=150)
@given(data=st.data())
def test_a_scaled_service_keeps_ratio_bounds_and_step_and_never_shrinks_on_an_unfit_signal(data):
    policy = data.draw(scaled_policies())
    spec, shape, bounds = policy.spec, shape_of(policy.spec), unit_bounds(policy.spec)
    if bounds.empty:
        return
    start = data.draw(st.integers(bounds.minimum, bounds.maximum))
    state = ScaledState(desired=shape.counts(start))
    now_s, base = NOW, start
    rng = data.draw(seeds)
    for _ in range(data.draw(st.integers(1, 8))):
        now_s += data.draw(st.sampled_from([1.0, 5.0, 60.0]))
        views = tuple(some_view(rng, role.role, now_s) for role in spec.roles)
        tick = ScaledInput(
            now_s=now_s,
            policy=policy,
            views=views,
            front=FrontDoor(window_end_s=now_s, held=some_signal(rng, 50)),
            replicas=tuple(RoleReplicas(role, count, count) for role, count in state.desired),
            state=state,
        )
        result = decide_scaled(tick)
        units = next(count for count in range(bounds.maximum + 1) if shape.counts(count) == result.state.desired)
        assert bounds.minimum <= units <= bounds.maximum
        step = spec.proportional.max_step_units
        if step and base > 0:
            assert abs(units - base) <= step
        if units < base:
            fit = next(view.decode_tps for view in views if view.role != Role.PREFILL)
            assert fit.fit_for_release
            assert now_s - views[-1].window_end_s <= spec.staleness_s
        if result.state.desired != state.desired:
            assert result.draft.kind == DecisionKind.SCALE
        state, base = result.state, units


RULES = st.fixed_dictionaries(
    {
        "allocation": st.sampled_from(["share", "load"]),
        "prediction": st.sampled_from(["power", "elasticity", "capacity", "none"]),
        "load": st.fixed_dictionaries(
            {
                "enabled": st.booleans(),
                "rescueAbove": st.sampled_from([0.5, 1.0]),
                "donorBelow": st.sampled_from([0.3, 0.5]),
                "maxWakes": st.sampled_from([1, 3]),
                "memoryS": st.sampled_from([0, 9]),
            }
        ),
        "overload": st.sampled_from(["rescue", "level"]),
        "settleS": st.sampled_from([0.0, 3.0]),
        "priorityBase": st.sampled_from([1.0, 1.5]),
        "donorMargin": st.sampled_from([0.0, 0.3]),
        "rebalanceWaits": st.booleans(),
    }
).filter(lambda rules: rules["load"]["enabled"] or rules["allocation"] != "load")


def pool_resources(sizes, gpus, floors, rules=None):
    policies = tuple(
        ServicePolicy.model_validate(
            {
                "metadata": {"name": name},
                "spec": {
                    "model": "m",
                    "slo": {"ttftS": 1, "tpotS": 1},
                    "roles": [
                        {
                            "role": "colocated",
                            "minReplicas": floor,
                            "maxReplicas": 4,
                            "gpusPerReplica": size,
                        }
                    ],
                    "priority": size,
                    "tokenServiceShare": {"thetaTps": 20, "capacityPrefillTps": 9000, "capacityDecodeTps": 4000},
                    "guards": {"ttftP95S": {"soft": 3, "hard": 9}, "queueGrowthRps": {"soft": 400}},
                },
            }
        )
        for name, size, floor in zip(("a", "b", "c"), sizes, floors, strict=True)
    )
    pool = Pool.model_validate(
        {
            "metadata": {"name": "shared"},
            "spec": {
                "cluster": "local",
                "gpus": [{"node": "n0", "gpuIndices": list(range(gpus))}, {"node": "n1", "gpuIndices": [0, 1]}],
                "members": [{"service": policy.name, "initialAwake": 1} for policy in policies],
                "rescueIntervalS": 1,
                "rebalanceIntervalS": 2,
                "residenceS": 3,
                "rules": rules or {},
            },
        }
    )
    return pool, policies


def some_front(rng, now_s):
    return FrontDoor(
        window_end_s=now_s,
        held=some_signal(rng, 20),
        arrival_rps=some_signal(rng, 50),
        arrival_prompt_tps=some_signal(rng, 40_000),
        arrival_output_tps=some_signal(rng, 20_000),
    )


def gpus_of(overlay, awake):
    return [gpu for item in overlay if item.replica in awake for gpu in item.gpus]


@costly(max_examples=150)
@given(data=st.data())
def test_a_pool_never_breaks_budget_gpus_floors_or_signals(data):
    sizes = data.draw(st.sampled_from([(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1)]))
    floors = data.draw(st.tuples(*[st.integers(0, 1)] * 3))
    pool, policies = pool_resources(sizes, 2, floors, data.draw(RULES))
    birth = lay_out(LayoutInput(pool, policies))
    awake, state, now_s = birth.awake, PoolState(), NOW
    last_recorded = None
    rng = data.draw(seeds)
    floor_of = {policy.name: policy.spec.roles[0].min_replicas for policy in policies}
    for _ in range(data.draw(st.integers(1, 10))):
        now_s += 1.0
        views = tuple(
            (MemberKey(name, Role.COLOCATED), some_view(rng, Role.COLOCATED, now_s)) for name in ("a", "b", "c")
        )
        broken = rng.sample(sorted(item.replica for item in birth.overlay), rng.choice([0, 0, 1, 2]))
        tick = PoolInput(
            now_s=now_s,
            pool=pool,
            policies=policies,
            overlay=birth.overlay,
            awake=awake,
            replicas=facts(birth.overlay, awake, failed=broken, in_flight=lambda: rng.randint(0, 3)),
            views=views,
            fronts=tuple((name, some_front(rng, now_s)) for name in ("a", "b", "c")),
            state=state,
        )
        result = decide_pool(tick)
        used = gpus_of(birth.overlay, result.awake)
        assert len(set(used)) == len(used) <= pool.spec.budget_gpus
        counts = {name: sum(1 for replica in result.awake if replica.startswith(f"{name}-")) for name in floor_of}
        before = {name: sum(1 for replica in awake if replica.startswith(f"{name}-")) for name in floor_of}
        reports = {report.key.service: report for report in result.reports}
        for name, count in counts.items():
            assert count >= min(before[name], floor_of[name])
            if count < before[name]:
                assert reports[name].share.fit_for_release
        if result.awake != awake:
            transition = result.draft.transition
            assert set(result.awake) ^ set(awake) == {
                change.replica for change in (*transition.releases, *transition.wakes)
            }
            gain = {change.service for change in transition.wakes}
            assert gain.isdisjoint(change.service for change in transition.releases)
            assert len(gain) <= 1 + bool(transition.releases), "only what a release frees beside is another's"
        if result.draft is not None:
            last_recorded = tick
        awake, state = result.awake, result.state
    if last_recorded is not None:
        assert_replays(last_recorded)


# To the nanosecond, as earlier releases wrote it.
DECIDED = Timestamp(seconds=1_700_000_000, nanos=123_456_789)


def header():
    return RecordHeader("d-1", DECIDED, "policy-engine", 7, (("local", 3),), (("Pool/shared", "4"),))


def assert_replays(tick):
    draft = run_core(tick)
    record = record_of(draft, tick, header())
    wire = decision_pb2.Decision.FromString(record.SerializeToString())
    assert decode_input(wire) == tick
    assert same(replay(wire), record)


def example_records():
    """A few decisions of every core, as hex: printed by the subprocess of the test below."""
    pool, policies = pool_resources((1, 2, 1), 4, (1, 1, 0))
    busy = RoleSignals(
        role=Role.COLOCATED,
        window_end_s=NOW,
        **{name: Measurement(value, Quality.OK) for name, value in {
            "prefill_tps": 0.1, "decode_tps": 3.3, "running": 7.7, "waiting": 1 / 3, "ttft_p95_s": 0.1 + 0.2,
        }.items()},
    )  # fmt: skip
    idle = replace(busy, running=Measurement(0.0, Quality.OK), waiting=Measurement(0.0, Quality.OK))
    tick = born(
        pool,
        policies,
        now_s=NOW + 0.1,
        views={MemberKey(name, Role.COLOCATED): view for name, view in (("a", busy), ("b", busy), ("c", idle))},
        fronts={"a": FrontDoor(window_end_s=NOW, held=Measurement(2.0, Quality.OK))},
    )
    spec = ServicePolicy.model_validate(
        {
            "metadata": {"name": "pd"},
            "spec": {
                "model": "m",
                "slo": {"ttftS": 1, "tpotS": 1},
                "roles": [{"role": "prefill", "maxReplicas": 9}, {"role": "decode", "maxReplicas": 20}],
                "ratio": {"prefill": 1, "decode": 3},
                "proportional": {"targetPerReplica": 0.7},
            },
        }
    )
    scaled = ScaledInput(
        now_s=NOW + 0.1,
        policy=spec,
        views=(replace(busy, role=Role.PREFILL), replace(busy, role=Role.DECODE)),
        front=FrontDoor(),
        replicas=(RoleReplicas(Role.PREFILL, 1, 1), RoleReplicas(Role.DECODE, 3, 3)),
        state=ScaledState(desired=((Role.PREFILL, 1), (Role.DECODE, 3))),
    )
    records = []
    for core_input in (LayoutInput(pool, policies), tick, scaled):
        draft = run_core(core_input)
        assert draft is not None
        records.append(record_of(draft, core_input, header()))
    return records


def test_the_same_bits_under_two_hash_seeds():
    program = (
        "import importlib.util, sys;"
        f"spec = importlib.util.spec_from_file_location('invariants', {__file__!r});"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module);"
        "print('\\n'.join(item.SerializeToString(deterministic=True).hex() for item in module.example_records()))"
    )
    outputs = set()
    for seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    for line in outputs.pop().split():
        record = decision_pb2.Decision.FromString(bytes.fromhex(line))
        assert same(replay(record), record)


def test_a_tampered_record_does_not_replay():
    record = example_records()[1]
    given = decode_input(record)
    tampered = decision_pb2.Decision()
    tampered.CopyFrom(record)
    tampered.replay = encode_input(replace(given, awake=given.awake[:-1]))
    assert not same(replay(tampered), record)
