"""The dialects that are shipped, and a user's own: the edge at which mappings become dialects."""

from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from trimtab.config.dialects.mapping import DialectError, parse_dialects
from trimtab.config.yamlfile import YamlError, read_bounded_text
from trimtab.domain.dialects.model import Dialect

# A page is read by the first dialect of which it has a mark; V0's marks are on no page of V1.
_SHIPPED = ("vllm-v0", "vllm-v1", "sglang")


@cache
def shipped_dialects() -> tuple[Dialect, ...]:
    """The dialects of this package, in the order in which a page is tried."""
    folder = resources.files(__package__)
    found: list[Dialect] = []
    for name in _SHIPPED:
        found += parse_dialects((folder / f"{name}.yaml").read_text("utf-8"), source=f"{name}.yaml")
    return tuple(found)


def load_dialects(extra_paths: Sequence[Path] = ()) -> tuple[Dialect, ...]:
    """The shipped dialects and those of the files ``extra_paths``, in the order in which a page is tried.

    A user's dialect goes before the shipped ones; one of the same name takes its place. A file may extend what the
    files before it define. Raises ``DialectError``, whose one line names the file and the field.
    """
    dialects = shipped_dialects()
    for path in extra_paths:
        try:
            text = read_bounded_text(path)
        except YamlError as error:
            raise DialectError(str(error)) from error
        own = parse_dialects(text, source=str(path), known=dialects)
        names = {dialect.name for dialect in own}
        dialects = (*own, *(dialect for dialect in dialects if dialect.name not in names))
    return dialects
