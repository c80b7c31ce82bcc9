"""Reads YAML that people write: bounded in size, no duplicate keys, errors that name file and line."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

MAX_YAML_BYTES = 4 * 1024 * 1024


class YamlError(ValueError):
    """A YAML text cannot be read; the message is one line with the place of the fault."""


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice in one mapping: the later one would silently win.

    Aliases are refused too: nested ones let a small file grow without bound.
    """

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
