"""`trimtab evaluate tre-loads`: the traces of suite `tre` at a lighter and a heavier load."""

from lab.suites.tre import suite_of_loads as suite

__all__ = ["suite"]
