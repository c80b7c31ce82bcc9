"""Models in messages and back: what is not given stays so, and models decide what a value may be."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc
from pydantic import AliasGenerator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from trimtab.store.message_codec import Rules, SchemaMismatch
from trimtab.store.model_codec import ModelCodec

_PROTO = """
syntax = "proto3";
package models;
enum Rule { RULE_UNSPECIFIED = 0; RULE_BY_LOAD = 1; RULE_BY_SHARE = 2; }
message Part { string name = 1; repeated uint32 numbers = 2; }
message Whole {
  double limit_s = 1;
  optional double gain = 2;
  Rule rule = 3;
  Part part = 4;
  repeated Part parts = 5;
  uint64 revision = 6;
  string stored_only = 7;
}
"""


class Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=AliasGenerator(alias=to_camel), populate_by_name=True
    )


class Part(Model):
    name: str = "part"
    numbers: tuple[Annotated[int, Field(ge=0)], ...] = ()


class Whole(Model):
    limit_s: Annotated[float, Field(gt=0)] | None = None
    gain: float = 0.5
    rule: Literal["by-load", "by-share"] = "by-load"
    part: Part = Part()
    parts: tuple[Part, ...] = ()
    revision: int = 0
    of_code: str = "code"


RULES = Rules(only_value={Whole: frozenset({"of_code"})}, only_stored={"models.Whole": frozenset({"stored_only"})})


@pytest.fixture(scope="module")
def message(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("models")
    source, found = folder / "models.proto", folder / "models.bin"
    source.write_text(_PROTO)
    assert protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={found}", str(source)]) == 0
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(found.read_bytes()).file:
        pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("models.Whole"))


@pytest.fixture(scope="module")
def codec(message: Any) -> ModelCodec[Whole]:
    return ModelCodec(Whole, message, RULES)


@pytest.mark.parametrize(
    "whole",
    [
        Whole(),
        Whole(limit_s=2.0, gain=0.0, rule="by-share", revision=2**53),
        Whole(part=Part(name="", numbers=(0, 3)), parts=(Part(), Part(name="b"))),
    ],
)
def test_a_model_survives_the_way_into_a_message_and_back(codec: ModelCodec[Whole], whole: Whole) -> None:
    expected = whole.model_copy(update={"part": Part(name=whole.part.name or "part", numbers=whole.part.numbers)})
    assert codec.read(codec.write(whole)) == expected


def test_what_a_message_does_not_have_is_not_in_its_document(codec: ModelCodec[Whole], message: Any) -> None:
    assert codec.document(message()) == {}
    assert codec.document(message(gain=0.0, rule=2, parts=[{}], stored_only="x")) == {
        "gain": 0.0,
        "rule": "by-share",
        "parts": ({},),
    }
    assert codec.document(message(limit_s=1.5, part={"numbers": [0]})) == {"limitS": 1.5, "part": {"numbers": (0,)}}


def test_what_no_value_can_be_is_for_the_model_to_refuse(codec: ModelCodec[Whole], message: Any) -> None:
    assert codec.document(message(rule=77, gain=float("nan"), limit_s=float("-inf"))) == {
        "rule": 77,
        "gain": "NaN",
        "limitS": "-Infinity",
    }
    with pytest.raises(ValidationError, match="rule"):
        codec.read(message(rule=77))


def test_fields_that_the_release_does_not_know_survive_a_rewrite(codec: ModelCodec[Whole], message: Any) -> None:
    before = message(gain=1.0, stored_only="kept")
    before.MergeFromString(b"\xf2\x07\x05later")
    after = codec.write(Whole(gain=2.0), onto=before)
    assert (after.gain, after.stored_only) == (2.0, "kept")
    assert after.SerializeToString().endswith(b"\xf2\x07\x05later")


class Renamed(Model):
    limit_s: float = Field(0.0, alias="limit")


class Words(Model):
    rule: Literal["by-load", "by-luck"] = "by-load"


@pytest.mark.parametrize(
    ("model", "complaint"), [(Renamed, "its alias is limit"), (Words, "differ in BY_LUCK, BY_SHARE")]
)
def test_names_and_words_that_differ_are_told_when_the_codec_is_made(
    message: Any, model: type[Model], complaint: str
) -> None:
    others = {"gain", "rule", "part", "parts", "revision", "stored_only", "limit_s"} - set(model.model_fields)
    with pytest.raises(SchemaMismatch, match=complaint):
        ModelCodec(model, message, Rules(only_stored={"models.Whole": frozenset(others)}))
