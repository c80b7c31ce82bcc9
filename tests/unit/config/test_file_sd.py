"""file_sd documents: what they say, and what is refused with which place."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config.file_sd import (
    MAX_TARGETS,
    FileSdError,
    TargetLabels,
    file_stamp,
    parse_file_sd,
    read_file_sd,
)
from trimtab.config.yamlfile import MAX_YAML_BYTES, dump_yaml_documents
from trimtab.domain.vocabulary import Role


def group(*addresses: str, **labels: object) -> dict[str, object]:
    return {"targets": list(addresses), "labels": labels}


def test_every_label_that_is_known() -> None:
    (target,) = parse_file_sd(
        [
            group(
                "h:8000",
                __scheme__="https",
                service="chat",
                role="prefill-ffn",
                replica="chat-0",
                model="org/Model-8B",
                cluster="east",
                node="gpu-a",
                gpu_type="A100-40GB",
                gpus="2",
                gpu_indices="3,1",
                exporter="dcgm",
                __metrics_path__="/gpu/metrics",
                team="x",
            )
        ],
        file="t.yaml",
    )

    assert (target.replica, target.url, target.place) == ("chat-0", "https://h:8000", "t.yaml: [0].targets[0]")
    assert target.labels.model_dump() == {
        "scheme": "https",
        "metrics_path": "/gpu/metrics",
        "exporter": "dcgm",
        "service": "chat",
        "role": Role.PREFILL_FFN,
        "replica": "chat-0",
        "model": "org/Model-8B",
        "cluster": "east",
        "node": "gpu-a",
        "gpu_type": "A100-40GB",
        "gpus": 2,
        "gpu_indices": (1, 3),
    }


@pytest.mark.parametrize("document", [[{"targets": ["h:1"]}], [{"targets": ["h:1"], "labels": None}], [group("h:1")]])
def test_what_is_not_said_stays_open(document: object) -> None:
    (target,) = parse_file_sd(document, file="t.yaml")

    assert (target.replica, target.url, target.labels) == ("h:1", "http://h:1", TargetLabels())
    assert (target.labels.role, target.labels.gpus, target.labels.gpu_indices) == (None, None, ())


@pytest.mark.parametrize("address", ["h:1", "10.0.0.7:65535", "[::1]:8000", "a_b.svc.cluster.local:80"])
def test_addresses(address: str) -> None:
    assert [target.address for target in parse_file_sd([group(address)], file="t")] == [address]


BAD: dict[str, tuple[object, str]] = {
    "no list": ({"targets": ["h:1"]}, "t.yaml: expected a list of groups, each with targets and labels"),
    "text": ("h:1", "t.yaml: expected a list of groups, each with targets and labels"),
    "nothing": (None, "t.yaml: expected a list of groups, each with targets and labels"),
    "no mapping": ([group("h:1"), "h:2"], "t.yaml: [1]: expected a mapping with targets and labels"),
    "no targets": ([{"labels": {}}], "t.yaml: [0].targets: expected a list of host:port"),
    "targets as text": ([{"targets": "h:1"}], "t.yaml: [0].targets: expected a list of host:port"),
    "a target that is no text": ([{"targets": ["h:1", 8000]}], "t.yaml: [0].targets[1]: expected text, host:port"),
    "labels as a list": (
        [{"targets": ["h:1"], "labels": ["a"]}],
        "t.yaml: [0].labels: expected a mapping of text to text",
    ),
    "a number": ([group("h:1", gpus=4)], "t.yaml: [0].labels.gpus: expected text; put it in quotes"),
    "a truth value": ([group("h:1", replica=True)], "t.yaml: [0].labels.replica: expected text; put it in quotes"),
    "an ignored label": ([group("h:1", team=None)], "t.yaml: [0].labels.team: expected text; put it in quotes"),
    "a label's name": (
        [{"targets": ["h:1"], "labels": {1: "a"}}],
        "t.yaml: [0].labels[1]: expected text; put it in quotes",
    ),
    "a label's name of two lines": (
        [group("h:1", **{"a\nb": 1})],
        "t.yaml: [0].labels['a\\nb']: expected text; put it in quotes",
    ),
    "no port": ([group("h")], "t.yaml: [0].targets[0]: 'h' must be host:port"),
    "a URL": ([group("http://h:1")], "t.yaml: [0].targets[0]: 'http://h:1' must be host:port"),
    "no such port": ([group("h:99999")], "t.yaml: [0].targets[0]: 'h:99999' must be host:port"),
    "port zero": ([group("h:0")], "t.yaml: [0].targets[0]: 'h:0' must be host:port"),
    "a path": ([group("h:2", "h:1/metrics")], "t.yaml: [0].targets[1]: 'h:1/metrics' must be host:port"),
    "a user": ([group("u@h:1")], "t.yaml: [0].targets[0]: 'u@h:1' must be host:port"),
    "a line break": ([group("h\n:1")], "t.yaml: [0].targets[0]: 'h\\n:1' must be host:port"),
    "a space": ([group("h h:1")], "t.yaml: [0].targets[0]: 'h h:1' must be host:port"),
    "a role": (
        [group("h:1", role="decoder")],
        "t.yaml: [0]: label role is 'decoder', must be one of colocated, prefill, decode, prefill-attention, ",
    ),
    "a service": (
        [group("h:1", service="Chat!")],
        "t.yaml: [0]: label service is 'Chat!', a name has 1 to 63 lower-case letters, digits and hyphens",
    ),
    "a service with a line break": (
        [group("h:1", service="chat\n")],
        "t.yaml: [0]: label service is 'chat\\n', a name has 1 to 63 lower-case letters, digits and hyphens",
    ),
    "a replica": (
        [group("h:1", replica="x" * 300)],
        f"t.yaml: [0]: label replica is '{'x' * 80}', must be at most 253 printable characters",
    ),
    "a model": (
        [group("h:1", model="a\tb")],
        "t.yaml: [0]: label model is 'a\\tb', must be at most 253 printable characters",
    ),
    "GPUs": ([group("h:1", gpus="many")], "t.yaml: [0]: label gpus is 'many', must be a number from 0 to 1024"),
    "too many GPUs": (
        [group("h:1", gpus="1025")],
        "t.yaml: [0]: label gpus is '1025', must be a number from 0 to 1024",
    ),
    "other digits": ([group("h:1", gpus="٤")], "t.yaml: [0]: label gpus is '٤', must be a number from 0 to 1024"),
    "GPU indices": ([group("h:1", gpu_indices="0-1")], "t.yaml: [0]: label gpu_indices is '0-1', must be like 0,1"),
    "a GPU twice": ([group("h:1", gpu_indices="1,1")], "t.yaml: [0]: label gpu_indices is '1,1', names a GPU twice"),
    "GPUs that disagree": (
        [group("h:1", gpus="4", gpu_indices="0,1")],
        "t.yaml: [0]: label gpus is 4, but gpu_indices names 2",
    ),
    "a scheme": ([group("h:1", __scheme__="ftp")], "t.yaml: [0]: label __scheme__ is 'ftp', must be http or https"),
    "one replica of two": (
        [group("h:1", "h:2", replica="r")],
        "t.yaml: [0].labels.replica: one replica cannot have 2 targets",
    ),
    "a replica twice": (
        [group("h:1", replica="r"), group("h:2", replica="r")],
        "t.yaml: [1].targets[0]: 'r' is listed twice, differently",
    ),
    "an address twice": (
        [group("h:1", replica="r"), group("h:1", replica="s")],
        "t.yaml: [1].targets[0]: h:1 is listed for 'r' and for 's'",
    ),
    "too many": ([group(*[f"h:{1 + index % 60_000}" for index in range(MAX_TARGETS + 1)])], "t.yaml: more than 100000"),
}


@pytest.mark.parametrize("what", sorted(BAD))
def test_a_malformed_document_is_one_line_with_its_place(what: str) -> None:
    document, message = BAD[what]
    with pytest.raises(FileSdError) as caught:
        parse_file_sd(document, file="t.yaml")

    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_servers_come_by_name_and_one_listed_twice_is_one() -> None:
    document = [group("h:2", "h:1", service="chat"), group("h:1", service="chat"), group("h:9", replica="a")]

    assert [target.replica for target in parse_file_sd(document, file="t")] == ["a", "h:1", "h:2"]


_LABELS = st.fixed_dictionaries(
    {},
    optional={
        "service": st.from_regex(r"[a-z]{1,5}", fullmatch=True),
        "role": st.sampled_from([role.value for role in Role]),
        "model": st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
        "gpu_indices": st.lists(st.integers(0, 15), unique=True, max_size=4).map(
            lambda found: ",".join(map(str, found))
        ),
    },
)


@given(st.lists(_LABELS, max_size=5))
def test_json_and_yaml_say_the_same(tmp_path_factory: pytest.TempPathFactory, labels: list[dict[str, str]]) -> None:
    document = [group(f"h:{1 + index}", **texts) for index, texts in enumerate(labels)]
    folder = tmp_path_factory.mktemp("sd")
    (folder / "t.json").write_text(json.dumps(document))
    (folder / "t.yaml").write_text(dump_yaml_documents([document]))

    def read(name: str) -> list[tuple[str, TargetLabels]]:
        return [(target.url, target.labels) for target in read_file_sd(folder / name)]

    assert read("t.json") == read("t.yaml")
    assert [address for address, _ in read("t.json")] == [f"http://h:{1 + index}" for index in range(len(labels))]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["targets", "labels", "gpus", "role", "replica"]) | st.integers(), inner)
    ),
    max_leaves=12,
)


@given(_VALUES)
def test_whatever_it_is_it_is_read_or_refused_in_one_line(document: object) -> None:
    refusal = ""
    try:
        targets = parse_file_sd(document, file="t")
    except FileSdError as error:
        targets, refusal = (), str(error)

    assert "\n" not in refusal
    assert refusal == "" or refusal.startswith("t: ")
    assert all(target.url.startswith("http") for target in targets)


FILES: dict[str, tuple[str, bytes, str]] = {
    "broken JSON": ("t.json", b"[", "not JSON: "),
    "an empty JSON file": ("t.json", b"", "not JSON: "),
    "a key twice in JSON": ("t.json", b'[{"targets": [], "targets": []}]', "not JSON: key 'targets' is given twice"),
    "deep JSON": ("t.json", b"[" * 100_000, "not JSON: "),
    "broken YAML": ("t.yaml", b"- [", ":"),
    "a key twice in YAML": ("t.yml", b"- {targets: [], targets: []}", ":1:17: key 'targets' is given twice"),
    "two documents": ("t.yaml", b"--- []\n--- []\n", ": expected one document, found 2"),
    "not UTF-8": ("t.yaml", b"- \xff", ": not UTF-8 at byte 2"),
    # In characters the text is short enough.
    "too large": ("t.json", ("é" * (MAX_YAML_BYTES // 2 + 1)).encode(), f": larger than {MAX_YAML_BYTES} bytes"),
}


@pytest.mark.parametrize("what", sorted(FILES))
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, what: str) -> None:
    name, raw, message = FILES[what]
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(FileSdError) as caught:
        read_file_sd(path)

    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileSdError, match=r"gone\.yaml: No such file"):
        read_file_sd(tmp_path / "gone.yaml")
    assert file_stamp(tmp_path / "gone.yaml") is None


def test_an_empty_yaml_file_lists_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("# nothing yet\n")

    assert read_file_sd(path) == ()


def test_a_stamp_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("[]")
    before = file_stamp(path)
    assert before == file_stamp(path)

    path.write_text("[ ]")

    assert file_stamp(path) != before
