"""Pure part of the actuator: life cycle, holds, GPU ledger, operations. No I/O, no clock, no randomness."""
