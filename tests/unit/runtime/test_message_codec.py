"""Values in messages and back; what this release does not know of a message survives its rewrites."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc
from hypothesis import given
from hypothesis import strategies as st

from trimtab.store.message_codec import Codec, Form, Rules, SchemaMismatch, Unreadable

_PROTO = """
syntax = "proto3";
package %s;
enum Colour { COLOUR_UNSPECIFIED = 0; COLOUR_RED = 1; COLOUR_DARK_BLUE = 2; }
message Part { string name = 1; Colour colour = 2; double mass = 3; optional string note = 4; }
message Key { string service = 1; uint32 index = 2; }
message Counted { Key key = 1; uint64 count = 2; }
message Row { repeated double cells = 1; }
message Maybe { optional double value = 1; }
message Group { repeated Part parts = 1; }
message Tally { repeated Counted counted = 1; }
message Foreign { string text = 1; }
message Whole {
  bool on = 1;
  int64 number = 2;
  bytes blob = 3;
  optional double limit = 4;
  Part part = 5;
  Part spare = 6;
  repeated Part parts = 7;
  repeated string names = 8;
  repeated Colour colours = 9;
  map<string, uint64> totals = 10;
  map<string, Part> by_name = 11;
  repeated Counted counted = 12;
  repeated Row table = 13;
  repeated Maybe readings = 14;
  repeated Key pairs = 15;
  map<string, Group> groups = 16;
  string size = 17;
  Foreign foreign = 18;
  Whole child = 19;
  string renamed_at_rest = 20;
  optional Colour favourite = 21;
  %s
}
"""
_LATER = "Later later = 30;"


def _messages(folder: Path, package: str, more: str = "") -> Callable[[str], type[Any]]:
    text = _PROTO % (package, more)
    if more:
        text = text.replace("optional string note = 4;", "optional string note = 4; string later = 9;")
        text = text.replace("uint64 count = 2;", "uint64 count = 2; string later = 9;")
        text += "message Later { string text = 1; }"
    source, found = folder / f"{package}.proto", folder / f"{package}.bin"
    source.write_text(text)
    assert protoc.main(["protoc", f"-I{folder}", f"--descriptor_set_out={found}", str(source)]) == 0
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(found.read_bytes()).file:
        pool.Add(file)
    return lambda name: GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], type[Any]]:
    return _messages(tmp_path_factory.mktemp("now"), "codec")


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], type[Any]]:
    """The messages of a later release with fields of its own."""
    return _messages(tmp_path_factory.mktemp("later"), "codec", _LATER)


class Colour(StrEnum):
    RED = "red"
    DARK_BLUE = "dark-blue"


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    colour: Colour = Colour.RED
    mass: float = 1.0
    note: str | None = None


class Key(NamedTuple):
    service: str
    index: int


class Text:
    """A type with a codec of its own."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    on: bool = False
    number: int = 0
    blob: bytes = b""
    limit: float | None = None
    part: Part = field(default_factory=lambda: Part(name="p"))
    spare: Part | None = None
    parts: tuple[Part, ...] = ()
    names: frozenset[str] = frozenset()
    colours: tuple[Colour, ...] = ()
    totals: Mapping[str, int] = field(default_factory=dict)
    by_name: Mapping[str, Part] = field(default_factory=dict)
    counted: Mapping[Key, int] = field(default_factory=dict)
    table: tuple[tuple[float, ...], ...] = ()
    readings: tuple[float | None, ...] = ()
    pairs: tuple[tuple[str, int], ...] = ()
    groups: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    size: Size = Size.SMALL
    foreign: Text = field(default_factory=lambda: Text(""))
    child: "Whole | None" = None
    own: str = ""
    favourite: Colour | None = None
    memo: int = 0


def _rules(foreign: type[Any]) -> Rules:
    def write(value: Text, message: Any) -> None:
        message.text = value.text

    return Rules(
        ids={Part: ("name",)},
        names={Whole: {"own": "renamed_at_rest"}},
        only_value={Whole: frozenset({"memo"})},
        forms={Text: Form(message=foreign, write=write, read=lambda message: Text(message.text))},
    )


@pytest.fixture(scope="module")
def codec(now: Callable[[str], type[Any]]) -> Codec[Whole]:
    return Codec(Whole, now("Whole"), _rules(now("Foreign")))


_TEXT = st.text(max_size=5)
_FLOAT = st.floats(allow_nan=False, allow_infinity=False)
_COUNT = st.integers(min_value=0, max_value=2**32 - 1)
_PARTS = st.builds(Part, name=_TEXT, colour=st.sampled_from(Colour), mass=_FLOAT, note=st.none() | _TEXT)
_KEYS = st.builds(Key, service=_TEXT, index=_COUNT)
_FLAT = st.builds(
    Whole,
    on=st.booleans(),
    number=st.integers(min_value=-(2**63), max_value=2**63 - 1),
    blob=st.binary(max_size=5),
    limit=st.none() | _FLOAT,
    part=_PARTS,
    spare=st.none() | _PARTS,
    parts=st.lists(_PARTS, max_size=4).map(tuple),
    names=st.frozensets(_TEXT, max_size=4),
    colours=st.lists(st.sampled_from(Colour), max_size=3).map(tuple),
    totals=st.dictionaries(_TEXT, _COUNT, max_size=3),
    by_name=st.dictionaries(_TEXT, _PARTS, max_size=3),
    counted=st.dictionaries(_KEYS, _COUNT, max_size=3),
    table=st.lists(st.lists(_FLOAT, max_size=2).map(tuple), max_size=3).map(tuple),
    readings=st.lists(st.none() | _FLOAT, max_size=3).map(tuple),
    pairs=st.lists(st.tuples(_TEXT, _COUNT), max_size=3).map(tuple),
    groups=st.dictionaries(_TEXT, st.lists(_PARTS, max_size=2).map(tuple), max_size=2),
    size=st.sampled_from(Size),
    foreign=_TEXT.map(Text),
    own=_TEXT,
    favourite=st.none() | st.sampled_from(Colour),
)
_WHOLES = st.builds(lambda outer, inner: replace(outer, child=inner), _FLAT, st.none() | _FLAT)


@given(value=_WHOLES)
def test_a_value_comes_back_as_it_was(codec: Codec[Whole], value: Whole) -> None:
    raw = codec.write(value).SerializeToString(deterministic=True)
    back = codec.read(codec.message_type.FromString(raw))
    assert back == value
    assert list(back.counted) == list(value.counted), "the order of entries is kept"


@given(before=_WHOLES, after=_WHOLES)
def test_what_is_written_over_another_value_is_that_value_alone(
    codec: Codec[Whole], before: Whole, after: Whole
) -> None:
    fresh = codec.write(after).SerializeToString(deterministic=True)
    assert codec.write(after, codec.write(before)).SerializeToString(deterministic=True) == fresh


def test_fields_of_a_later_release_survive_a_rewrite_at_every_level(
    codec: Codec[Whole], later: Callable[[str], type[Any]]
) -> None:
    a, b, c = (Part(name=name) for name in "abc")
    value = Whole(part=a, parts=(a, b, c), by_name={"x": a, "y": b}, groups={"g": (a, b)}, child=Whole(part=c))
    newer = later("Whole").FromString(codec.write(value).SerializeToString())
    newer.later.text = "top"
    for name, part in (("part", newer.part), ("x", newer.by_name["x"]), ("y", newer.by_name["y"])):
        part.later = name
    for part in (*newer.parts, *newer.groups["g"].parts):
        part.later = f"in a list: {part.name}"
    newer.child.part.later = "child"
    previous = codec.message_type.FromString(newer.SerializeToString())

    changed = replace(
        value,
        part=replace(a, mass=7.0),
        parts=(replace(c, mass=9.0), Part(name="new"), a),
        by_name={"y": replace(b, note="n")},
        groups={"g": (b,)},
        child=replace(value.child or Whole(), number=5),
    )
    back = later("Whole").FromString(codec.write(changed, previous).SerializeToString())

    assert codec.read(codec.message_type.FromString(back.SerializeToString())) == changed
    assert back.later.text == "top"
    assert back.part.later == "part"
    assert [(part.name, part.later) for part in back.parts] == [
        ("c", "in a list: c"),
        ("new", ""),
        ("a", "in a list: a"),
    ]
    assert {name: part.later for name, part in back.by_name.items()} == {"y": "y"}
    assert [part.later for part in back.groups["g"].parts] == ["in a list: b"]
    assert back.child.part.later == "child"


def test_elements_without_ids_keep_what_is_unknown_of_them_while_they_are_the_same(
    now: Callable[[str], type[Any]], later: Callable[[str], type[Any]]
) -> None:
    @dataclass(frozen=True)
    class Group:
        parts: tuple[Part, ...]

    codec = Codec(Group, now("Group"), Rules(ids={Part: ()}))
    newer = later("Group").FromString(codec.write(Group((Part(name="a"), Part(name="b")))).SerializeToString())
    for part in newer.parts:
        part.later = part.name
    previous = codec.message_type.FromString(newer.SerializeToString())
    written = codec.write(Group((Part(name="b"), Part(name="a", mass=2.0))), previous)
    back = later("Group").FromString(written.SerializeToString())
    assert [part.later for part in back.parts] == ["b", ""]


def test_elements_may_be_told_apart_by_a_field_of_a_message_within(
    now: Callable[[str], type[Any]], later: Callable[[str], type[Any]]
) -> None:
    @dataclass(frozen=True)
    class Counted:
        key: Key
        count: int

    @dataclass(frozen=True)
    class Tally:
        counted: tuple[Counted, ...]

    codec = Codec(Tally, now("Tally"), Rules(ids={Counted: ("key.service",)}))
    before = Tally((Counted(Key("a", 1), 10), Counted(Key("b", 1), 20)))
    newer = later("Tally").FromString(codec.write(before).SerializeToString())
    for element in newer.counted:
        element.later = element.key.service
    previous = codec.message_type.FromString(newer.SerializeToString())
    written = codec.write(Tally((Counted(Key("b", 2), 30), Counted(Key("c", 1), 10))), previous)
    assert [element.later for element in later("Tally").FromString(written.SerializeToString()).counted] == ["b", ""]
    for ids, expected in (("key.name", "Key has no id field name"), ("count.service", "count has no id field service")):
        with pytest.raises(SchemaMismatch, match=expected):
            Codec(Tally, now("Tally"), Rules(ids={Counted: (ids,)}))


@given(before=_WHOLES, order=st.randoms(use_true_random=False))
def test_elements_keep_their_unknown_fields_in_any_order(
    codec: Codec[Whole], later: Callable[[str], type[Any]], before: Whole, order: Any
) -> None:
    by_name = {part.name: part for part in before.parts}
    before = replace(before, parts=tuple(by_name.values()))
    newer = later("Whole").FromString(codec.write(before).SerializeToString())
    for part in newer.parts:
        part.later = f"of {part.name}"
    shuffled = list(before.parts)
    order.shuffle(shuffled)
    after = replace(before, parts=tuple(replace(part, mass=part.mass / 2) for part in shuffled[1:]))
    written = codec.write(after, codec.message_type.FromString(newer.SerializeToString()))
    back = later("Whole").FromString(written.SerializeToString())
    assert [part.later for part in back.parts] == [f"of {part.name}" for part in after.parts]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda m: m.ClearField("part"), "part: is missing", id="a message that must be there"),
        pytest.param(lambda m: setattr(m.part, "colour", 0), "part.colour: 0 is no Colour", id="no enum value"),
        pytest.param(lambda m: setattr(m.part, "colour", 77), "part.colour: 77 is no Colour", id="a later enum value"),
        pytest.param(lambda m: setattr(m, "limit", math.nan), "limit: nan is no finite number", id="NaN"),
        pytest.param(lambda m: setattr(m.part, "mass", -math.inf), "part.mass: -inf is no finite", id="infinity"),
        pytest.param(lambda m: m.parts.add(), r"parts\[0\].colour: 0 is no Colour", id="in a list"),
        pytest.param(lambda m: m.by_name["k"].SetInParent(), r"by_name\['k'\].colour: 0", id="in a map"),
        pytest.param(lambda m: setattr(m, "size", "xl"), "size: 'xl' is no Size", id="a text that is no choice"),
        pytest.param(lambda m: m.table.add().cells.append(math.inf), r"table\[0\]\[0\]: inf", id="in a list of lists"),
        pytest.param(lambda m: m.counted.add(), r"counted\[0\].key: is missing", id="an entry without a key"),
    ],
)
def test_a_message_that_is_no_value_is_named_by_field(
    codec: Codec[Whole], change: Callable[[Any], object], expected: str
) -> None:
    message = codec.write(Whole())
    change(message)
    with pytest.raises(Unreadable, match=expected):
        codec.read(message)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Whole(limit=math.nan), "limit: nan is no finite number"),
        (Whole(number=2**70), "number: "),
        (Whole(parts=(Part(name="a"), Part(name="b", mass=math.inf))), r"parts: \[1\].mass: inf is no finite"),
    ],
)
def test_what_cannot_be_stored_is_named_by_field(codec: Codec[Whole], value: Whole, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        codec.write(value)


def _of(name: str, hint: Any) -> type[Any]:
    """A type with one field."""
    return dataclass(frozen=True)(type("Sample", (), {"__annotations__": {name: hint}}))


class Wider(StrEnum):
    RED = "red"
    DARK_BLUE = "dark-blue"
    GREEN = "green"


@pytest.mark.parametrize(
    ("message", "value_type", "expected"),
    [
        ("Row", _of("other", tuple[float, ...]), "other has no field other; codec.Row.cells has no field in Sample"),
        ("Row", _of("cells", tuple[int, ...]), "cannot be codec.Row.cells"),
        ("Row", _of("cells", float), "cannot be repeated"),
        ("Maybe", _of("value", str), "cannot be codec.Maybe.value"),
        ("Foreign", _of("text", str | None), "may be None, codec.Foreign.text has no presence"),
        ("Foreign", _of("text", str | int), "cannot be codec.Foreign.text"),
        ("Group", _of("parts", tuple[Part, ...]), "what tells one Part from another"),
    ],
)
def test_what_does_not_correspond_is_found_when_the_codec_is_made(
    now: Callable[[str], type[Any]], message: str, value_type: type[Any], expected: str
) -> None:
    with pytest.raises(SchemaMismatch, match=expected):
        Codec(value_type, now(message))


def test_an_enum_with_a_member_that_is_not_stored_is_found_when_the_codec_is_made(
    now: Callable[[str], type[Any]],
) -> None:
    @dataclass(frozen=True)
    class Sample:
        name: str
        colour: Wider
        mass: float
        note: Literal["", "x"] | None

    with pytest.raises(SchemaMismatch, match=r"Wider and codec\.Colour differ in GREEN"):
        Codec(Sample, now("Part"))
