"""Keys: one slot per owner, and no name that forges another's key."""

import re
from collections.abc import Callable

import pytest

from trimtab.store import keys

TAG = re.compile(r"\{([^}]+)\}")


@pytest.mark.parametrize(
    ("owner", "built"),
    [
        (
            "policy-engine",
            [
                keys.lease(keys.POLICY_ENGINE),
                keys.lease_token(keys.POLICY_ENGINE),
                keys.decisions(),
                keys.decision_index(),
                keys.scaling_requests(),
                keys.desired_pools(),
                keys.engine_state("tss"),
                keys.paused(),
                keys.documents(keys.POLICY_ENGINE, "pool"),
                keys.documents_revision(keys.POLICY_ENGINE, "pool"),
                keys.document_history(keys.POLICY_ENGINE, "pool", "main"),
            ],
        ),
        (
            "prescheduler",
            [
                keys.lease(keys.PRESCHEDULER),
                keys.lease_token(keys.PRESCHEDULER),
                keys.cycles(),
                keys.schedule_results(),
                keys.deployment_groups(),
            ],
        ),
        (
            "actuator/eu-1",
            [
                build("eu-1")
                for build in (
                    keys.replicas,
                    keys.operations,
                    keys.pool_states,
                    keys.placements,
                    keys.fencing_tokens,
                    keys.endpoints,
                    keys.endpoints_written,
                    keys.gateways,
                    keys.gateway_words,
                    keys.gateways_spoke,
                    keys.revisions,
                )
            ],
        ),
        (
            "obs/chat/ROLE_DECODE",
            [
                build("chat", "ROLE_DECODE")
                for build in (keys.latest_partials, keys.partial_history, keys.latest_samples)
            ],
        ),
        ("collector", [keys.observed_roles(), keys.demand(), keys.collector_members(), keys.sample_schemas()]),
    ],
)
def test_what_one_owner_writes_together_shares_a_hash_tag(owner: str, built: list[str]) -> None:
    assert [TAG.findall(key) for key in built] == [[owner]] * len(built)
    assert all(key.startswith(keys.PREFIX) for key in built)
    assert len(set(built)) == len(built)


@pytest.mark.parametrize("part", ["}", "a{b", "a}b", "a b", "a\n", "x" * 254, "ü"])
@pytest.mark.parametrize(
    "build",
    [keys.replicas, lambda part: keys.latest_partials(part, "ROLE_DECODE"), lambda part: keys.owned("o", part)],
)
def test_a_part_that_could_forge_a_key_is_refused(build: Callable[[str], str], part: str) -> None:
    with pytest.raises(ValueError, match="cannot be part"):
        build(part)


def test_different_owners_never_meet() -> None:
    assert keys.replicas("a") != keys.replicas("b")
    assert keys.lease("actuator/a") != keys.lease(keys.POLICY_ENGINE)
    assert keys.latest_partials("a", "ROLE_DECODE") != keys.latest_partials("a", "ROLE_PREFILL")
