"""Stubs of trimtab.store.v1."""
