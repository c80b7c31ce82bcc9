"""Pure serving model: continuous batching, paged KV blocks, sleep states and deterministic text, on virtual time.

No I/O, no clock, no randomness: every function takes the time as an argument, in seconds.
"""
