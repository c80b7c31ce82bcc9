"""Stubs of trimtab.actuator."""
