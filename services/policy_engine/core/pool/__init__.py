"""Pools: members in need, donors, and the one transition of a tick. Imports of `shared` alone."""
