"""Lengths and gaps of recorded traces, as small histograms."""
