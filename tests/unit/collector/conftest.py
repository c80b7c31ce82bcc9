"""The fixtures of tests/support/collector.py that tests of the core use."""

from tests.support.collector import vllm_page  # noqa: F401
