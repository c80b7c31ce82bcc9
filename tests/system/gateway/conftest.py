"""The fixtures of tests/support/gateway.py."""

from tests.support.gateway import gateway, states, wait_until  # noqa: F401
