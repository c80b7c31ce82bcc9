"""Stubs of trimtab.policy.v1."""
