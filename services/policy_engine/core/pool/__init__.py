"""Pools: who is pressed, who may give, and the one transition of a tick. Imports of `shared` alone."""
