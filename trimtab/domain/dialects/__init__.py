"""Parsers of the pages of engines and exporters, shared by every service: families, units, labels."""
