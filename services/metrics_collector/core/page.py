"""Reads the families of a dialect from a page in the Prometheus text format; skips everything else unparsed.

What is refused: a page that is too large, empty, not text, cut in the middle of a line, without any family of a
dialect, with a malformed line in one, or with a family or a series twice (``PageError``: an error of that target
alone). A value that is NaN, infinite, negative or absurd is counted in ``rejected`` and takes its whole quantity with
it: part of a sum is not a smaller sum.

A ``Hint`` names the layout of a target's last page; the layouts themselves are kept here, once for all targets whose
pages are alike, and the least used ones are forgotten. A reading does not depend on the hint.

Limits: on a page with ``# TYPE`` lines a sample counts in the block of a family that is read, and nowhere else;
timestamps and exemplars are skipped; OpenMetrics pages of vLLM (``vllm_`` for ``vllm:``) are understood, OpenMetrics
in general is not.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from metrics_collector.core.parser.layout import Layout, PageError, Vocabulary, learn
from metrics_collector.core.schema import Reading
from trimtab.domain.dialects.model import Dialect

__all__ = ["MAX_PAGE_BYTES", "Hint", "PageError", "PageReader"]

MAX_PAGE_BYTES = 4 * 1024 * 1024
MAX_LAYOUTS = 4_096
MAX_LAYOUT_BYTES = 1024 * 1024
MAX_LAYOUTS_BYTES = 128 * 1024 * 1024

_TYPE = b"\n# TYPE "


class Hint(NamedTuple):
    """What is known of a target from its last page: its dialect, and which layout its page had."""

    dialect: str
    layout: bytes


class PageReader:
    """Reads pages of several dialects; one serves every target. Not for several threads at once."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self._dialects = tuple(dialects)
        self._vocabularies = tuple(map(Vocabulary, self._dialects))
        self._layouts: OrderedDict[bytes, Layout] = OrderedDict()
        self._layouts_bytes = 0

    def sample_names(self, dialect: str | None = None) -> tuple[str, ...]:
        """What to ask for in ``/metrics/?name[]=…``: all that ``dialect`` reads, or any of them when it is unknown."""
        names = {
            name for one in self._dialects if dialect is None or one.name == dialect for name in one.sample_names()
        }
        return tuple(sorted(names))

    @property
    def layouts_kept(self) -> int:
        """How many layouts are remembered."""
        return len(self._layouts)

    @property
    def layouts_bytes(self) -> int:
        """About the memory that they take."""
        return self._layouts_bytes

    def read(self, page: bytes, hint: Hint | None) -> tuple[Reading, Hint]:
        """(the page's reading, the hint for this target's next page). Raises ``PageError``."""
        _check(page)
        # Only a page that begins with its first family has no line before it.
        blocks = (b"\n" + page if page.startswith(b"# TYPE ") else page).split(_TYPE)
        if hint is not None:
            layout = self._layouts.get(hint.layout)
            texts = None if layout is None else layout.texts(blocks)
            if layout is not None and texts is not None:
                self._layouts.move_to_end(hint.layout)
                return layout.plan.reading(texts), hint
        learnt = learn(self._vocabularies, blocks, self._layouts)
        if learnt.key is not None:
            self._keep(learnt.key, learnt.layout)
        layout = learnt.layout
        return layout.plan.reading(layout.values(learnt.rows)), Hint(layout.dialect, learnt.key or b"")

    def _keep(self, key: bytes, layout: Layout) -> None:
        """Remembers a layout, for the least used of the others if need be."""
        if key in self._layouts:
            self._layouts.move_to_end(key)
            return
        if layout.size_bytes > MAX_LAYOUT_BYTES:
            return
        self._layouts[key] = layout
        self._layouts_bytes += layout.size_bytes
        while len(self._layouts) > MAX_LAYOUTS or self._layouts_bytes > MAX_LAYOUTS_BYTES:
            _, dropped = self._layouts.popitem(last=False)
            self._layouts_bytes -= dropped.size_bytes


def _check(page: bytes) -> None:
    if len(page) > MAX_PAGE_BYTES:
        raise PageError(f"the page has more than {MAX_PAGE_BYTES} bytes")
    if not page or page.isspace():
        raise PageError("the page is empty")
    if page[:64].lstrip().startswith((b"<", b"{", b"[")) or b"\0" in page:
        raise PageError("the page is not in the Prometheus text format")
    if not page.endswith(b"\n"):
        raise PageError("the page is cut: its last line has no end")
