"""Two profiles for Hypothesis: ``quick`` for every day, ``thorough`` (``--hypothesis-profile=thorough``) for the rest.

They differ in the properties that are ``costly``: these run a quarter of their examples in the quick profile. All
others run all of theirs in both, so that a second, thorough run takes only what is marked ``costly``.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

QUICK = "quick"
THOROUGH = "thorough"
QUICK_SHARE = 0.25

Test = TypeVar("Test", bound=Callable[..., object])


def register_profiles() -> None:
    """Register both profiles and load the quick one.

    No example has a deadline: how long it takes by the wall clock says how busy the machine is.
    """
    for name in (QUICK, THOROUGH):
        settings.register_profile(name, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile(QUICK)


def costly(*, max_examples: int, **more: Any) -> Callable[[Test], Test]:
    """Decorator: a property with ``max_examples`` in the thorough profile and a quarter of them in the quick one.

    ``more`` are settings of Hypothesis.
    """
    thorough = settings.get_current_profile_name() == THOROUGH
    count = max_examples if thorough else round(max_examples * QUICK_SHARE)

    def decorate(test: Test) -> Test:
        return pytest.mark.costly(settings(max_examples=count, deadline=None, **more)(test))

    return decorate
