"""Fleets of simulated engines on virtual time: hours in seconds, from the same engine model as the live servers.

Pure but for the traces that callers read: no clock, no sockets; whatever is random comes from a seed.
"""
