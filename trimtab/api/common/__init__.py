"""Stubs of trimtab.common."""
