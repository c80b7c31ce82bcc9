"""The control plane's own cores on virtual time: hours of a fleet in seconds, decided by the code that production runs.

`result` is what a run leaves behind, whoever decided; evaluations read nothing else.
"""
