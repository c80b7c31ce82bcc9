"""What a pool's resource says reaches the actuator and its store under one name."""

from dataclasses import fields, replace
from typing import Any

from actuator.core.model import Pool as StoredPool
from policy_engine.core.pool.desired import desired_pool
from trimtab.api.actuator.v1 import actuator_pb2
from trimtab.api.policy.v1 import policy_pb2
from trimtab.config.resources import POOL, SERVICE_POLICY
from trimtab.config.specs import PoolSpec
from trimtab.domain.pool import PoolSettings, desired_from_proto, desired_to_proto, settings_in

SETTINGS: dict[str, Any] = {"drain_timeout_s": 7.0, "sleep_level": 2, "prewarm": True, "residence_s": 33.0}
"""None is a default."""


def test_every_setting_stands_under_its_name_in_spec_and_message() -> None:
    names = {item.name for item in fields(PoolSettings)}
    assert SETTINGS.keys() <= names
    assert names <= PoolSpec.model_fields.keys()
    assert names == set(policy_pb2.PoolSettings.DESCRIPTOR.fields_by_name)
    assert names <= {item.name for item in fields(StoredPool)}


def test_older_releases_are_understood_and_understand() -> None:
    told = desired_to_proto(desired_from_proto(actuator_pb2.PoolState(pool="p", **SETTINGS)))
    assert {name: getattr(told, name) for name in SETTINGS} == SETTINGS
    assert {name: getattr(told.settings, name) for name in SETTINGS} == SETTINGS
    told.drain_timeout_s = 1.0
    assert desired_from_proto(told).drain_timeout_s == SETTINGS["drain_timeout_s"]


def test_what_a_pool_s_resource_says_is_what_its_actuator_is_told() -> None:
    pool = POOL.validate(
        {
            "metadata": {"name": "shared"},
            "spec": {
                "cluster": "east",
                "gpus": [{"node": "n", "gpuIndices": [0]}],
                "members": [{"service": "chat"}],
                "drainTimeoutS": 7,
                "sleepLevel": 2,
                "prewarm": True,
                "residenceS": 33,
            },
        }
    )
    policy = SERVICE_POLICY.validate(
        {
            "metadata": {"name": "chat"},
            "spec": {
                "model": "m",
                "slo": {"ttftS": 1, "tpotS": 0.1},
                "roles": [{"role": "colocated", "maxReplicas": 1}],
                "tokenServiceShare": {"thetaTps": 20},
            },
        }
    )
    desired = desired_pool(pool, [policy], (), (), "decision")
    assert settings_in(desired).items() >= SETTINGS.items()
    assert settings_in(desired_from_proto(desired_to_proto(desired))).items() >= SETTINGS.items()
    cold = pool.model_copy(update={"spec": pool.spec.model_copy(update={"prewarm": False})})
    unused = replace(desired, prewarm=False, residence_s=0.0)
    assert desired_pool(cold, [policy], (), (), "decision") == unused
