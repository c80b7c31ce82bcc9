"""Stubs of trimtab.collector."""
