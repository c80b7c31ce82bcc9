"""Stubs of trimtab.collector.v1."""
