"""The engine's records: what older releases wrote is read, what cannot be read is refused, what is unknown survives."""

from dataclasses import replace

import pytest

from policy_engine.core.decision import explain, same
from policy_engine.core.pool.decide import Barred, PoolState
from policy_engine.core.pool.guards import QueueMemory
from policy_engine.core.pool.load import ArrivalMemory, OutputMemory
from policy_engine.core.pool.members import MemberMemory
from policy_engine.core.pool.predict import Elasticity
from policy_engine.core.pool.sustained_need import NeedMemory
from policy_engine.core.pool.tss import ShareState
from policy_engine.core.scaled.decide import ScaledState
from policy_engine.core.scaled.stabilise import History
from policy_engine.core.shared.vocabulary import ClampKind, MemberKey, Region
from policy_engine.shell.replay import REPLAY_INPUT, ReplayError, decode_input, encode_input, replay
from policy_engine.shell.state_records import DESIRED_POOL, POOL_STATE, SCALED_STATE
from tests.support.records import (
    garbage,
    has_unknown_field,
    newer,
    old_hashes,
    truncated,
    with_unknown_field,
)
from tests.unit.policy.test_invariants import example_records
from trimtab.api.policy.v1 import decision_pb2
from trimtab.domain.vocabulary import Role
from trimtab.store import keys
from trimtab.store.records import Refused, RefusedReason

NOW = 1_700_000_000.125
OLD = old_hashes("policy_engine")
FULL_POOL = PoolState(
    members=(
        MemberMemory(
            MemberKey("chat", Role.COLOCATED),
            share=ShareState(21.5, Region.CRITICAL, NOW - 5),
            received_at_s=NOW - 60.25,
            moved_at_s=NOW - 50.5,
            moved_to=3,
            output=OutputMemory(410.75, 2.5, NOW - 5),
            queue=QueueMemory(12.0, NOW - 5, -0.4),
            elasticity=Elasticity(1.25, 2, 0.8125, 3.75),
            arrivals=ArrivalMemory(2.5, 2.25, 17.5, 3.5, NOW - 300, NOW - 5, ((NOW - 10, 2.0), (NOW - 5, 3.0))),
            spells=NeedMemory(0.3, NOW - 10, NOW - 9, 2, NOW - 5),
            was_idle=True,
            began_at_s=NOW - 120,
        ),
        MemberMemory(MemberKey("pd", Role.PREFILL), share=ShareState(None, Region.SURPLUS, None)),
        MemberMemory(MemberKey("pd", Role.DECODE), queue=QueueMemory(0.0, NOW - 5)),
    ),
    barred=(Barred("chat-node-0-1", NOW + 20, 2),),
    fast_at_s=NOW - 5,
    slow_at_s=NOW - 10,
    notes=((ClampKind.SIGNAL_QUALITY, NOW - 30), (ClampKind.PAUSED, NOW - 20)),
    unserved=(("chat: critical", NOW - 15),),
    round=("chat", "pd"),
    round_slow=True,
)
FULL_SCALED = ScaledState(
    desired=((Role.PREFILL, 2), (Role.DECODE, 4)),
    history=History(((NOW - 20, 3), (NOW - 10, 4), (NOW - 5, 4)), NOW - 5, NOW - 100, NOW - 400),
    queued=7.5,
    queued_at_s=NOW - 5,
    notes=((ClampKind.SCALE_IN_COOLING, NOW - 5),),
)
POOLS, SCALED, DESIRED = keys.engine_state("pools"), keys.engine_state("scaled"), keys.desired_pools()
INPUT = example_records()[1].replay
KINDS = {
    "pool": (POOL_STATE, POOL_STATE.encode(FULL_POOL)),
    "scaled": (SCALED_STATE, SCALED_STATE.encode(FULL_SCALED)),
    "desired": (DESIRED_POOL, OLD[DESIRED]["shared"]),
    "input": (REPLAY_INPUT, INPUT),
}


@pytest.mark.parametrize(
    ("kind", "raw", "expected"),
    [
        (POOL_STATE, OLD[POOLS]["shared"], FULL_POOL),
        (POOL_STATE, OLD[POOLS]["fresh"], PoolState()),
        (SCALED_STATE, OLD[SCALED]["reason"], FULL_SCALED),
        (SCALED_STATE, OLD[SCALED]["batch"], ScaledState()),
    ],
    ids=["full pool", "blank pool", "full service", "blank service"],
)
def test_states_of_releases_before_schema_numbers_are_read_and_written_anew(kind, raw, expected):
    assert raw.startswith(b"{")
    assert kind.decode(raw, key="k", field="f") == expected
    again = kind.encode(expected, previous=raw)
    assert again.startswith(b"\x08\x01")
    assert kind.decode(again, key="k", field="f") == expected


def test_a_desired_state_of_such_a_release_is_read():
    desired = DESIRED_POOL.decode(OLD[DESIRED]["shared"], key="k", field="shared")
    assert (desired.pool, desired.state_revision, len(desired.overlay), len(desired.awake)) == ("shared", 12, 8, 4)
    assert desired.decision_id == "d-018bcfe56800-1"
    assert DESIRED_POOL.decode(DESIRED_POOL.encode(desired), key="k") == desired


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("spoil", "reason", "words"),
    [
        (newer, RefusedReason.NEWER, "has schema 2, this release reads"),
        (truncated, RefusedReason.CORRUPT, ""),
        (garbage, RefusedReason.CORRUPT, ""),
    ],
    ids=["newer", "truncated", "garbage"],
)
def test_what_cannot_be_read_is_refused_with_its_place_and_a_remedy(name, spoil, reason, words):
    kind, raw = KINDS[name]
    refused = kind.decode(spoil(kind, raw), key="trimtab:{x}:y", field="shared")
    assert isinstance(refused, Refused)
    assert refused.reason == reason
    assert words in refused.why
    assert str(refused).startswith("trimtab:{x}:y, field shared: ")
    assert "HDEL 'trimtab:{x}:y' 'shared'" in refused.remedy


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"{}", b"[]", b"null", OLD[POOLS]["shared"][:-1], OLD[POOLS]["shared"].replace(b"CRITICAL", b"ODD")],
)
@pytest.mark.parametrize("kind", [POOL_STATE, SCALED_STATE], ids=["pool", "scaled"])
def test_json_that_is_no_state_is_refused_and_does_not_count_as_a_blank_one(kind, raw):
    assert isinstance(kind.decode(raw, key="k", field="f"), Refused)


@pytest.mark.parametrize("name", KINDS)
def test_a_record_that_is_cut_off_anywhere_is_refused(name):
    kind, raw = KINDS[name]
    raw = kind.encode(kind.decode(raw, key="k"))
    for length in range(len(raw)):
        assert isinstance(kind.decode(raw[:length], key="k"), Refused), length


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("pool", ()),
        ("pool", ("state",)),
        ("pool", ("state", "members")),
        ("pool", ("state", "members", "arrivals")),
        ("pool", ("state", "barred")),
        ("scaled", ()),
        ("scaled", ("state", "history")),
        ("desired", ("state",)),
        ("desired", ("state", "overlay")),
        ("input", ()),
        ("input", ("pool", "state")),
    ],
)
def test_fields_that_this_release_does_not_know_survive_a_rewrite(name, path):
    kind, raw = KINDS[name]
    raw = with_unknown_field(kind, raw, *path)
    value = kind.decode(raw, key="k")
    assert not isinstance(value, Refused)
    if name == "pool":
        value = replace(value, members=tuple(reversed(value.members)), fast_at_s=NOW)
    elif name == "scaled":
        value = replace(value, queued=9.0, history=replace(value.history, last_fit_s=NOW))
    elif name == "desired":
        value = replace(value, state_revision=value.state_revision + 1)
    written = kind.encode(value, previous=raw)
    assert has_unknown_field(kind.undamaged(written))
    assert kind.decode(written, key="k") == value


def test_an_element_that_is_gone_takes_what_is_unknown_of_it_along():
    raw = with_unknown_field(POOL_STATE, POOL_STATE.encode(FULL_POOL), "state", "members")
    value = POOL_STATE.decode(raw, key="k")
    written = POOL_STATE.encode(replace(value, members=value.members[1:]), previous=raw)
    assert not has_unknown_field(POOL_STATE.undamaged(written))


def test_a_decision_with_an_unknown_field_in_its_input_replays():
    record = example_records()[1]
    record.replay = with_unknown_field(REPLAY_INPUT, record.replay, "pool")
    assert same(replay(record), record)


OLD_DECISIONS = [decision_pb2.Decision.FromString(raw) for _, raw in sorted(OLD[keys.decision_index()].items())]


@pytest.mark.parametrize("record", OLD_DECISIONS, ids=lambda record: record.decision_id)
def test_an_input_from_before_schema_numbers_is_shown_and_not_replayed(record):
    assert record.replay_input.startswith('{"format":1')
    assert explain(record)[0].startswith(record.decision_id)
    with pytest.raises(ReplayError, match=r"of schema 0 \(JSON\).* shown and not replayed"):
        replay(record)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            newer,
            r"decision-inputs, field d-1: has schema 2, this release reads .* up to 1; it is shown and not replayed",
        ),
        (truncated, "checksum is not right"),
        (lambda kind, raw: b"", "its input is not kept"),
        (lambda kind, raw: kind.encode(kind.decode(raw, key="k")) + b"x", "checksum is not right"),
    ],
    ids=["newer", "truncated", "missing", "longer"],
)
def test_an_input_that_cannot_be_read_says_why(spoil, words):
    record = example_records()[1]
    record.replay = spoil(REPLAY_INPUT, record.replay)
    with pytest.raises(ReplayError, match=words):
        replay(record)


def test_inputs_come_back_equal():
    for record in example_records():
        given = decode_input(record)
        assert encode_input(given) == record.replay
        assert same(replay(record), record)
