"""Stubs of trimtab.common.v1."""
