"""Dialects: which families of an engine's page hold which quantity. As data in YAML files, shipped or a user's own."""

from metrics_collector.core.dialects.loader import load_dialects, shipped_dialects
from metrics_collector.core.dialects.mapping import DialectError, parse_dialects
from metrics_collector.core.dialects.model import Combine, Dialect, Family, Kind, Quantity, Source

__all__ = [
    "Combine",
    "Dialect",
    "DialectError",
    "Family",
    "Kind",
    "Quantity",
    "Source",
    "load_dialects",
    "parse_dialects",
    "shipped_dialects",
]
