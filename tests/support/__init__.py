"""What tests of several tiers share: stand-ins, rigs, and the fixtures that the folders' conftests import."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{path.stem}" for path in Path(__file__).parent.glob("[a-z]*.py")))
