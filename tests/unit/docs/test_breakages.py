"""The list of breakages can be put into the product as it stands; `python -m tests.breakages` does so."""

import re
from pathlib import Path

import pytest

from tests.breakages import ROOT, Breakage, breakages, places

LIST = breakages()


def test_there_are_ten_at_least_and_each_has_a_name_of_its_own() -> None:
    assert len({breakage.name for breakage in LIST}) == len(LIST) >= 10


@pytest.mark.parametrize("breakage", LIST, ids=lambda breakage: breakage.name)
def test_its_text_stands_in_the_product_once_and_its_tests_are_there(breakage: Breakage) -> None:
    assert len(places(breakage.text)) == 1
    assert breakage.text != breakage.replacement
    assert breakage.tests
    for test in breakage.tests:
        file, _, name = test.partition("::")
        assert Path(file).parts[0] in ("unit", "services", "stack"), "in a tier of `make test`"
        found = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(async def |def )?{re.escape(name)}( = |\()", found, re.MULTILINE), test
