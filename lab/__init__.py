"""The laboratory: evaluates policies, on virtual time and on live stacks.

`lab.virtual` runs the cores of production on virtual time, `lab.baselines` holds other autoscalers to compare with;
`suites`, `studies`, `calibration` and `fitting` measure with them, `evaluation` reports, `chaos` breaks a live stack.
It imports the cores of the services and the gateway, never their shells; nothing below imports it.
"""
