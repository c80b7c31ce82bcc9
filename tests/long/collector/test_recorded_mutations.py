"""A hundred thousand damaged pages of recorded servers, under the checks of the unit tests."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.collector import vllm_page  # noqa: F401
from tests.unit.collector.pages.test_mutations import (
    MUTATIONS,
    Pages,
    filtered,
    test_damaged_pages_leave_no_more_in_memory_than_the_layouts_kept,  # noqa: F401
    test_no_damaged_page_crashes_hangs_fills_the_memory_or_gets_anything_absurd_in,  # noqa: F401
    written_pages,
)


@pytest.fixture(scope="module", params=["recorded"])
def pages(material: Path, vllm_page: Callable[..., bytes]) -> Pages:  # noqa: F811
    """(pages with the read families alone, full pages, how many mutations of them)."""
    full = [gzip.decompress(path.read_bytes()) for path in sorted((material / "vllm" / "captures").glob("*.prom.gz"))]
    full += [path.read_bytes() for path in sorted((material / "data" / "metrics").iterdir())]
    short = [short for page in full if (short := filtered(page))]
    return short + written_pages(vllm_page), full, MUTATIONS
