"""Fields that a message has no room for of its own, in a message within."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc

from trimtab.store.message_codec import Codec, Rules, SchemaMismatch

_PROTO = """
syntax = "proto3";
package within;
message Settings { double drain_s = 1; uint32 level = 2; optional double rest_s = 3; string host = 4; }
message Record { string name = 1; double drain_s = 2; Settings settings = 3; }
"""


@dataclass(frozen=True, kw_only=True)
class Value:
    name: str
    drain_s: float = 0.0
    level: int = 7
    rest_s: float = 30.0
    host: str = "here"


@dataclass(frozen=True, kw_only=True)
class Fewer:
    name: str
    drain_s: float = 0.0
    level: int = 7


@dataclass(frozen=True, kw_only=True)
class More(Value):
    colour: str = ""


@pytest.fixture(scope="module")
def message(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], type[Any]]:
    folder: Path = tmp_path_factory.mktemp("within")
    source, found = folder / "within.proto", folder / "within.bin"
    source.write_text(_PROTO)
    assert protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={found}", str(source)]) == 0
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(found.read_bytes()).file:
        pool.Add(file)
    return lambda name: GetMessageClass(pool.FindMessageTypeByName(f"within.{name}"))


def _codec(value: type[Any], record: type[Any]) -> Codec[Any]:
    return Codec(value, record, Rules(within={value: "settings"}))


def test_a_field_without_one_of_its_own_stands_within(message: Callable[[str], type[Any]]) -> None:
    codec = _codec(Value, message("Record"))
    value = Value(name="a", drain_s=2.0, level=0, rest_s=0.0, host="")
    written = codec.write(value)
    assert (written.drain_s, written.settings.drain_s) == (2.0, 0.0), "what has a field of its own stands there alone"
    assert codec.read(written) == value


def test_what_was_not_written_has_the_value_s_default(message: Callable[[str], type[Any]]) -> None:
    record = message("Record")
    codec = _codec(Value, record)
    assert codec.read(record(name="a")) == Value(name="a")
    some = record(name="a", settings={"level": 3})
    assert codec.read(some) == Value(name="a", level=3, rest_s=30.0, host="")


def test_a_rewrite_keeps_what_stands_within_and_is_not_known(message: Callable[[str], type[Any]]) -> None:
    record = message("Record")
    codec = _codec(Value, record)
    before = record(name="a", settings={"level": 3})
    before.settings.MergeFromString(b"\xf2\x07\x05later")
    after = codec.write(Value(name="a", level=4), onto=before)
    assert after.settings.level == 4
    assert after.settings.SerializeToString().endswith(b"\xf2\x07\x05later")


@pytest.mark.parametrize(
    ("value", "complaint"),
    [(More, "More.colour has no field colour"), (Fewer, "Record.host has no field in Fewer")],
)
def test_fields_that_differ_are_told_when_the_codec_is_made(
    message: Callable[[str], type[Any]], value: type[Any], complaint: str
) -> None:
    with pytest.raises(SchemaMismatch, match=complaint):
        _codec(value, message("Record"))
