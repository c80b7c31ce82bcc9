"""Stubs of trimtab.store."""
