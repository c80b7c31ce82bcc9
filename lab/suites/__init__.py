"""Suites of `trimtab evaluate` that follow a paper's evaluation: set-ups, loads, policies and bars as data and code.

`tre_setup` is the TRE seed's test bed, `calibrate_loads` finds how much load its traces get, `tre_policies` what is
compared, `tre_bars` the bars, and `tre` puts them together.
"""
