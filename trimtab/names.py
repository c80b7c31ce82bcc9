"""What services, pools, clusters and processes may be called."""

import re

MAX_IDENTIFIER_LENGTH = 63
_IDENTIFIER = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def is_identifier(value: str) -> bool:
    """Whether ``value`` is a DNS-1123 label of at most 63 characters."""
    return len(value) <= MAX_IDENTIFIER_LENGTH and _IDENTIFIER.fullmatch(value) is not None
