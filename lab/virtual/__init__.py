"""The control plane's own cores on virtual time: hours of a fleet in seconds, decided by the code that production runs.

`result` holds the outcome of a run with any controller; evaluations read nothing else.
"""
