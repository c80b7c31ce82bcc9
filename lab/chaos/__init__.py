"""Faults at random moments against a live local stack under load, and what became of every request: `trimtab chaos`."""
