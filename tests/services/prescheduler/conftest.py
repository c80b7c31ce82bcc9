"""The fixtures of tests/support/prescheduler.py that tests of the service use."""

from tests.support.prescheduler import fleet, start_actuator  # noqa: F401
