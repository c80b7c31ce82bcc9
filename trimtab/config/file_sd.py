"""Reads Prometheus ``file_sd`` documents: servers and their labels.

A document is a list of groups, in JSON (``.json``) or YAML::

    - targets: ["10.0.0.7:8000"]
      labels: {service: chat, role: colocated, replica: chat-0, model: qwen, node: gpu-a, gpu_indices: "0,1"}

``parse_file_sd`` is pure; ``read_file_sd`` reads a file of at most 4 MiB. The labels known here are checked, others are
ignored, since the same file may serve Prometheus. All label values are text, as there. The caller decides what an
absent label means. Every error is one line that names the file and the place in it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from trimtab.config.yamlfile import YamlError, parse_yaml_documents, read_bounded_text
from trimtab.domain.vocabulary import Role
from trimtab.names import is_identifier

MAX_TARGETS: Final = 100_000
MAX_LABEL_LENGTH: Final = 253
MAX_GPUS: Final = 1024
_SHOWN: Final = 80


class FileSdError(ValueError):
    """A document is refused; the message is one line that names the file, the place and what would be right."""


def _service(value: str) -> str:
    if value and not is_identifier(value):
        raise ValueError("a name has 1 to 63 lower-case letters, digits and hyphens")
    return value


def _text(value: str) -> str:
    if len(value) > MAX_LABEL_LENGTH or not value.isprintable():
        raise ValueError(f"must be at most {MAX_LABEL_LENGTH} printable characters")
    return value


def _role(value: object) -> object:
    words = [role.value for role in Role]
    if value not in ("", *words):
        raise ValueError(f"must be one of {', '.join(words)}")
    return value or None


def _scheme(value: object) -> object:
    if value not in ("http", "https"):
        raise ValueError("must be http or https")
    return value


def _gpus(value: object) -> object:
    if not (isinstance(value, str) and re.fullmatch(r"[0-9]{1,4}", value) and int(value) <= MAX_GPUS):
        raise ValueError(f"must be a number from 0 to {MAX_GPUS}")
    return int(value)


def _gpu_indices(value: object) -> object:
    if value == "":
        return ()
    if not (isinstance(value, str) and re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})*", value)):
        raise ValueError("must be like 0,1")
    indices = sorted(int(index) for index in value.split(","))
    if len(set(indices)) != len(indices):
        raise ValueError("names a GPU twice")
    return tuple(indices)


def _exporter(value: object) -> object:
    if value not in ("", "dcgm"):
        raise ValueError("must be dcgm, the only GPU exporter that is read")
    return value


def _metrics_path(value: object) -> object:
    if not (isinstance(value, str) and re.fullmatch(r"(/[A-Za-z0-9._~%/-]{0,252})?", value)):
        raise ValueError("must be a path such as /metrics")
    return value


_Text = Annotated[str, AfterValidator(_text)]


class TargetLabels(BaseModel):
    """The labels that place a server. Text is empty where there is none."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    scheme: Annotated[Literal["http", "https"], BeforeValidator(_scheme)] = Field(default="http", alias="__scheme__")
    metrics_path: Annotated[str, BeforeValidator(_metrics_path)] = Field(default="", alias="__metrics_path__")
    exporter: Annotated[Literal["", "dcgm"], BeforeValidator(_exporter)] = ""
    service: Annotated[str, AfterValidator(_service)] = ""
    role: Annotated[Role | None, BeforeValidator(_role)] = None
    replica: _Text = ""
    model: _Text = ""
    cluster: _Text = ""
    node: _Text = ""
    gpu_type: _Text = ""
    gpus: Annotated[int | None, BeforeValidator(_gpus)] = None
    gpu_indices: Annotated[tuple[int, ...], BeforeValidator(_gpu_indices)] = ()
    """In order, each once."""


class FileSdTarget(BaseModel):
    """One server of a document."""

    model_config = ConfigDict(frozen=True)

    address: str
    """host:port"""
    labels: TargetLabels
    place: str
    """File and path within it, for errors."""

    @property
    def url(self) -> str:
        """``http://host:port``"""
        return f"{self.labels.scheme}://{self.address}"

    @property
    def replica(self) -> str:
        """Its name: the label, else its address."""
        return self.labels.replica or self.address


class _Group(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    targets: list[str]
    labels: Annotated[dict[str, str], BeforeValidator(lambda value: {} if value is None else value)] = {}


_GROUPS = TypeAdapter(list[_Group])
_EXPECTED: Final[Mapping[tuple[int, str], str]] = {
    (0, ""): "expected a list of groups, each with targets and labels",
    (1, ""): "expected a mapping with targets and labels",
    (2, "targets"): "expected a list of host:port",
    (2, "labels"): "expected a mapping of text to text",
    (3, "targets"): "expected text, host:port",
    (3, "labels"): "expected text; put it in quotes",
}
"""(depth, member) of the place that is wrong → what belongs there."""


def parse_file_sd(document: object, *, file: str) -> tuple[FileSdTarget, ...]:
    """The servers of a document as read from JSON or YAML, by name. ``file`` names it in errors.

    A server that is listed twice with the same labels is one. Raises ``FileSdError``, also for a name or an address
    that two different entries claim and for more than 100,000 targets.
    """
    try:
        groups = _GROUPS.validate_python(document)
    except ValidationError as error:
        loc = error.errors(include_url=False, include_input=False, include_context=False)[0]["loc"][:3]
        # A label's name is shown as it is unless it would break the line.
        place = "".join(f".{part}" if isinstance(part, str) and part.isprintable() else f"[{part!r}]" for part in loc)
        expected = _EXPECTED[len(loc), str(loc[1]) if len(loc) > 1 else ""]
        raise FileSdError(": ".join(part for part in (file, place[:_SHOWN], expected) if part)) from error
    if sum(len(group.targets) for group in groups) > MAX_TARGETS:
        raise FileSdError(f"{file}: more than {MAX_TARGETS} targets")
    return _distinct(
        target for index, group in enumerate(groups) for target in _targets(group, place=f"{file}: [{index}]")
    )


def _targets(group: _Group, *, place: str) -> Iterable[FileSdTarget]:
    try:
        labels = TargetLabels.model_validate(group.labels)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        reason = first.get("ctx", {}).get("error", first["msg"])
        raise FileSdError(f"{place}: label {name} is {group.labels[name][:_SHOWN]!r}, {reason}") from error
    if labels.replica and len(group.targets) > 1:
        raise FileSdError(f"{place}.labels.replica: one replica cannot have {len(group.targets)} targets")
    if labels.gpus is not None and labels.gpu_indices and labels.gpus != len(labels.gpu_indices):
        raise FileSdError(f"{place}: label gpus is {labels.gpus}, but gpu_indices names {len(labels.gpu_indices)}")
    for index, address in enumerate(group.targets):
        where = f"{place}.targets[{index}]"
        if not _is_host_and_port(address):
            raise FileSdError(f"{where}: {address[:_SHOWN]!r} must be host:port")
        yield FileSdTarget(address=address, labels=labels, place=where)


def _is_host_and_port(address: str) -> bool:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return False
    plain = parts.netloc == address and "@" not in address and address.isprintable() and " " not in address
    return bool(host and port) and plain and len(address) <= MAX_LABEL_LENGTH


def _distinct(targets: Iterable[FileSdTarget]) -> tuple[FileSdTarget, ...]:
    found: dict[str, FileSdTarget] = {}
    names: dict[str, str] = {}
    for target in targets:
        known = found.setdefault(target.replica, target)
        if (known.address, known.labels) != (target.address, target.labels):
            raise FileSdError(f"{target.place}: {target.replica!r} is listed twice, differently")
        name = names.setdefault(target.address, target.replica)
        if name != target.replica:
            raise FileSdError(f"{target.place}: {target.address} is listed for {name!r} and for {target.replica!r}")
    return tuple(found[name] for name in sorted(found))


def read_file_sd(path: Path) -> tuple[FileSdTarget, ...]:
    """The servers of a file, by name. Raises ``FileSdError``, also for a file that cannot be read."""
    try:
        text = read_bounded_text(path)
        documents = [_parse_json(text)] if path.suffix == ".json" else parse_yaml_documents(text, source=str(path))
    except YamlError as error:
        raise FileSdError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise FileSdError(f"{path}: not JSON: {error}") from error
    if len(documents) > 1:
        raise FileSdError(f"{path}: expected one document, found {len(documents)}")
    return parse_file_sd(documents[0] if documents else [], file=str(path))


def parse_http_sd(body: bytes, *, url: str) -> tuple[FileSdTarget, ...]:
    """The servers of a Prometheus ``http_sd`` answer, which is the same document in JSON. Raises ``FileSdError``."""
    try:
        document = _parse_json(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileSdError(f"{url}: not JSON: {error}") from error
    return parse_file_sd(document, file=url)


def _parse_json(text: str) -> object:
    def mapping(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = min(name for name in found if names.count(name) > 1)
            raise ValueError(f"key {twice[:_SHOWN]!r} is given twice")
        return found

    document: object = json.loads(text, object_pairs_hook=mapping)
    return document


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Time, size and inode of a file, which change when it does; None while there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
