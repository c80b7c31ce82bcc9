"""Dialects as data in YAML files, shipped or a user's own, and what reads them (`trimtab.domain.dialects.model`)."""

from trimtab.config.dialects.loader import load_dialects, shipped_dialects
from trimtab.config.dialects.mapping import DialectError, parse_dialects

__all__ = ["DialectError", "load_dialects", "parse_dialects", "shipped_dialects"]
