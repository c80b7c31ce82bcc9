"""Every limit that a policy may set is looked at, and called by its name."""

from dataclasses import replace

import pytest

from policy_engine.core.pool.guards import check_guards
from trimtab.config.specs import Guards
from trimtab.domain.measurement import ok
from trimtab.domain.role_signals import RoleSignals
from trimtab.domain.vocabulary import Role

SAID = {
    "ttft_p95_s": "TTFT p95 0.5 s is beyond its soft limit of 0.2 s",
    "tpot_p95_s": "TPOT p95 0.5 s is beyond its soft limit of 0.2 s",
    "kv_usage_ratio": "KV usage 0.5 is beyond its soft limit of 0.2",
    "e2e_p95_s": "E2E p95 0.5 s is beyond its soft limit of 0.2 s",
    "preemption_rps": "preemptions 0.5/s is beyond its soft limit of 0.2/s",
    "queue_growth_rps": "queue growth 0.5/s is beyond its soft limit of 0.2/s",
    "lost_ratio": "share of replicas lost 0.5 is beyond its soft limit of 0.2",
}


@pytest.mark.parametrize("field", Guards.model_fields)
def test_every_limit_is_looked_at(field: str) -> None:
    view = RoleSignals(role=Role.DECODE)
    beside = {"queue_growth_rps": "queue_growth", "lost_ratio": "lost"}
    own = {beside[field]: ok(0.5)} if field in beside else {}
    if not own:
        view = replace(view, **{field: ok(0.5)})
    found = check_guards(Guards.model_validate({field: {"soft": 0.2}}), view, **own)
    assert found.soft
    assert found.soft == SAID.get(field, found.soft)
    assert not check_guards(Guards.model_validate({field: {"soft": 0.6}}), view, **own).soft
