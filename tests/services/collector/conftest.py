"""The fixtures of tests/support/collector.py."""

from tests.support.collector import page_server, shared, start_collector, vllm_page  # noqa: F401
