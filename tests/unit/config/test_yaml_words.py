"""Plain words of YAML are read as version 1.2 has them; what a tag does not fit is refused with its place."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config.resources import ResourceError, parse_document
from trimtab.config.yamlfile import YamlError, dump_yaml_documents, parse_yaml_documents

POOL = """
apiVersion: trimtab.dev/v1
kind: Pool
metadata: {{name: shared}}
spec:
  cluster: local
  gpus: [{{node: n0, gpuIndices: [0]}}]
  members: [{{service: chat}}]
  {line}
"""


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("09", 9),
        ("-5", -5),
        ("1e-2", 0.01),
        ("1.5", 1.5),
        ("true", True),
        ("null", None),
        ("~", None),
        ("1:30", "1:30"),
        ("190:20:30.15", "190:20:30.15"),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("yes", "yes"),
        ("off", "off"),
        ("2026-11-30", "2026-11-30"),
        ("=", "="),
        ('"010"', "010"),
        ('"true"', "true"),
    ],
)
def test_plain_words_are_read_as_yaml_1_2_has_them(word: str, value: object) -> None:
    (found,) = parse_yaml_documents(f"key: {word}", source="a file")
    assert found == {"key": value}
    assert type(found["key"]) is type(value)


def test_what_is_not_finite_is_no_text() -> None:
    assert parse_yaml_documents("[.inf, -.INF]", source="a file") == [[math.inf, -math.inf]]
    (found,) = parse_yaml_documents("[.nan]", source="a file")
    assert math.isnan(found[0])  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: !!bool maybe", "f.yaml:2:4: is not a value of !!bool"),
        ("a: !!float much", "f.yaml:1:4: is not a value of !!float"),
        ("a: !!int 1:30", "f.yaml:1:4: is not a value of !!int"),
        ("a: !!timestamp today", "f.yaml:1:4: is not a value of !!timestamp"),
        ("spec:\n  a: 1\n  a: 2", "f.yaml:3:3: key 'a' is given twice"),
        ("8: 1\n010: 2\n8: 3", "f.yaml:3:1: key 8 is given twice"),
        ("? [1]\n: 2", "f.yaml:1:3: a key is not a scalar"),
    ],
)
def test_a_fault_is_told_with_file_and_line(text: str, said: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse_yaml_documents(text, source="f.yaml")
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("residenceS: 1:30", "spec.residenceS: must be a number, not the text '1:30'"),
        ("residenceS: 1_000", "spec.residenceS: must be a number, not the text '1_000': write 1000"),
        ("residenceS: .inf", "spec.residenceS: must be a finite number"),
        ("residenceS: .nan", "spec.residenceS: must be a finite number"),
        ("sleepLevel: .nan", "spec.sleepLevel: must be 1 or 2"),
        ("prewarm: yes", "spec.prewarm: must be true or false, not 'yes'"),
        ("prewarm: off", "spec.prewarm: must be true or false, not 'off'"),
        ("<<: {prewarm: true}", "spec.<<: unknown field"),
    ],
)
def test_a_resource_says_which_field_is_not_what_yaml_1_1_would_make_of_it(line: str, said: str) -> None:
    (document,) = parse_yaml_documents(POOL.format(line=line), source="pool.yaml")
    with pytest.raises(ResourceError) as caught:
        parse_document(document)
    assert str(caught.value).startswith(said)
    assert len(caught.value.violations) == 1


def test_a_leading_zero_makes_no_octal_number() -> None:
    (document,) = parse_yaml_documents(POOL.format(line="residenceS: 010"), source="pool.yaml")
    assert parse_document(document).spec.residence_s == 10.0  # type: ignore[union-attr]


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text("01:_eE+-.xoyn~=<", max_size=6),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text("yesno10:.e", max_size=4), inner, max_size=3)
        ),
    )
)
def test_what_is_written_is_read_back(value: object) -> None:
    document = {"value": value}
    assert parse_yaml_documents(dump_yaml_documents([document]), source="a file") == [document]
