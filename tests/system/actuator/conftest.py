"""The fixtures of tests/support/actuator.py."""

from tests.support.actuator import processes, serve, stack  # noqa: F401
