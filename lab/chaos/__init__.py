"""Faults at random moments against a live local stack under load, and the outcome of every request: `trimtab chaos`."""
