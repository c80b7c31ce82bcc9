"""Stubs of trimtab.actuator.v1."""
