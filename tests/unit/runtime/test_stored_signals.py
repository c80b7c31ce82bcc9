"""Signals of a role in stored records: one that the message has no field for is kept by its name."""

from dataclasses import dataclass, fields

from trimtab.api.store.v1 import engine_pb2
from trimtab.domain.measurement import NEVER_READ, Measurement, ok
from trimtab.domain.role_signals import RoleSignals
from trimtab.domain.vocabulary import Role
from trimtab.store.message_codec import Codec, Rules


@dataclass(frozen=True, slots=True)
class Later(RoleSignals):
    """The signals of a release that has one more."""

    power_w: Measurement = NEVER_READ


NOW = Codec(RoleSignals, engine_pb2.RoleWindow, Rules(others={RoleSignals: "others"}))
LATER = Codec(Later, engine_pb2.RoleWindow, Rules(others={Later: "others"}))


def test_a_signal_without_a_field_of_its_own_comes_back() -> None:
    later = Later(role=Role.DECODE, window_end_s=3.0, decode_tps=ok(7.0), power_w=ok(300.0))
    message = LATER.write(later)
    assert message.others["power_w"].value == 300.0
    assert LATER.read(message) == later


def test_a_record_from_before_a_signal_has_it_never_read() -> None:
    found = LATER.read(NOW.write(RoleSignals(role=Role.DECODE, decode_tps=ok(7.0))))
    assert found == Later(role=Role.DECODE, decode_tps=ok(7.0), power_w=NEVER_READ)


def test_a_signal_of_a_later_release_survives_a_rewrite() -> None:
    before = LATER.write(Later(role=Role.DECODE, power_w=ok(300.0)))
    known = NOW.read(before)
    assert known == RoleSignals(role=Role.DECODE)
    after = NOW.write(RoleSignals(role=Role.DECODE, decode_tps=ok(8.0)), onto=before)
    assert LATER.read(after) == Later(role=Role.DECODE, decode_tps=ok(8.0), power_w=ok(300.0))


def test_a_field_of_its_own_is_used_where_there_is_one() -> None:
    whole = NOW.write(RoleSignals(**{item.name: _value(item.name) for item in fields(RoleSignals)}))
    own = set(engine_pb2.RoleWindow.DESCRIPTOR.fields_by_name) - {"others"}
    assert {at.name for at, _ in whole.ListFields()} - {"others"} == own
    assert set(whole.others) == {item.name for item in fields(RoleSignals)} - own


def _value(name: str) -> object:
    return {"role": Role.PREFILL, "window_end_s": 1.0}.get(name, ok(1.0))
