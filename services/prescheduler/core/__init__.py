"""Pure placement: tree, capacity, candidates, scale-in. No I/O, no clock, no randomness."""
