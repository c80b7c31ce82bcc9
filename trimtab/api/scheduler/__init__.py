"""Stubs of trimtab.scheduler."""
