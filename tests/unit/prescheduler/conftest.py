"""The fixtures of tests/support/prescheduler.py that tests of the core use."""

from tests.support.prescheduler import fleet  # noqa: F401
