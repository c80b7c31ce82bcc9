"""Stubs of trimtab.scheduler.v1."""
