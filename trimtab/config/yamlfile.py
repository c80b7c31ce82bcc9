"""Reads YAML that people write: bounded in size, no duplicate keys, errors that name file and line.

Plain words are read as YAML 1.2's core schema has them, not as PyYAML does by 1.1: ``010`` is ten, ``1e-2`` a number,
``yes`` and ``1:30`` are text. What 1.1 would silently have made something else of is a fault of its field then.
"""

import re
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, Final

import yaml

MAX_YAML_BYTES = 4 * 1024 * 1024


class YamlError(ValueError):
    """A YAML text cannot be read; the message is one line with the place of the fault."""


_TAG: Final = "tag:yaml.org,2002:"
_CORE_SCHEMA: Final = (
    (_TAG + "null", re.compile(r"(?:~|null|Null|NULL|)\Z"), "~nN"),
    (_TAG + "bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), "tTfF"),
    (_TAG + "int", re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), "-+0123456789"),
    (
        _TAG + "float",
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
        ),
        "-+.0123456789",
    ),
)
"""YAML 1.2.2, section 10.3.2: a tag, which plain words have it, and what those begin with. The first that fits."""


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader of the core schema that refuses a key given twice in one mapping: the later one would silently win.

    Aliases are refused too: nested ones let a small file grow without bound.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own attribute

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a scalar", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.get_event().start_mark  # type: ignore[no-untyped-call]  # types-pyyaml leaves it open
            raise yaml.composer.ComposerError(None, None, "aliases are not supported", mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError):
            # What its own constructors raise for text that does not fit a tag that is written out.
            kind = node.tag.removeprefix(_TAG)
            problem = f"is not a value of !!{kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        """``010`` is ten and ``0o10`` eight; PyYAML's own reads the first as octal."""
        text = str(self.construct_scalar(node))
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would take for something other than text."""


for _tag, _words, _firsts in _CORE_SCHEMA:
    for _class in (_StrictLoader, _Dumper):
        _class.add_implicit_resolver(_tag, _words, [*_firsts, *([""] if _tag.endswith("null") else [])])
_StrictLoader.add_constructor(_TAG + "int", _StrictLoader.construct_whole_number)


def dump_yaml_documents(documents: Iterable[object]) -> str:
    """Plain data as YAML text that `parse_yaml_documents` reads back as it was."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_yaml_documents(text: str, *, source: str) -> list[object]:
    """The documents of ``text``, empty ones left out. ``source`` names the text in errors. Raises ``YamlError``."""
    if len(text) > MAX_YAML_BYTES:
        raise YamlError(f"{source}: larger than {MAX_YAML_BYTES} bytes")
    try:
        # _StrictLoader is a SafeLoader: it builds plain data only.
        return [document for document in yaml.load_all(text, Loader=_StrictLoader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise YamlError(f"{source}{place}: {error.problem or 'not YAML'}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        detail = str(error).splitlines() or ["not YAML"]
        raise YamlError(f"{source}: {detail[0]}") from error


def read_bounded_text(path: Path) -> str:
    """The text of a file of at most 4 MiB. Raises ``YamlError``, whatever the file should hold."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_YAML_BYTES + 1)
        if len(raw) > MAX_YAML_BYTES:
            raise YamlError(f"{path}: larger than {MAX_YAML_BYTES} bytes")
        return raw.decode("utf-8")
    except OSError as error:
        raise YamlError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise YamlError(f"{path}: not UTF-8 at byte {error.start}") from error


def read_yaml_documents(path: Path) -> list[object]:
    """The documents of a file. Raises ``YamlError`` for a file that cannot be read, too."""
    return parse_yaml_documents(read_bounded_text(path), source=str(path))
