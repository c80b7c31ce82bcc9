"""The I/O of the gateway. `serve` builds the process from the other modules.

`proxy`, `exchange` and `upstream` move the bytes, `dispatch` joins them with the router; `actuators` and `registry`
follow and acknowledge endpoint sets, which `routes` merges for each cluster.
"""
