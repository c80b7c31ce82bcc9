"""Stubs generated from protos/ by `make proto`. Not edited by hand."""
