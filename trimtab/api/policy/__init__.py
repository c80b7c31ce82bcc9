"""Stubs of trimtab.policy."""
