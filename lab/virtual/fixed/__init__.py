"""Fleets of a fixed size on virtual time: the virtual world without controllers, on the same clock of engines.

Pure but for the traces that callers read: no clock of the machine, no sockets; whatever is random comes from a seed.
"""
