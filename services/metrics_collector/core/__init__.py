"""The collector's pure part: pages to samples, samples to windows, windows to partials of a role.

Nothing here does I/O or reads a clock; times are seconds on the store's clock and are passed in.
"""
