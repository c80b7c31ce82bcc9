"""The fixtures of tests/support/actuator.py that tests within one process use."""

from tests.support.actuator import serve  # noqa: F401
