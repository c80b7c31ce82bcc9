"""What services, pools, clusters and processes may be called."""

import re

MAX_IDENTIFIER_LENGTH = 63
MAX_OBJECT_NAME_LENGTH = 253
_IDENTIFIER = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def is_identifier(value: str) -> bool:
    """Whether ``value`` is a DNS-1123 label of at most 63 characters."""
    return len(value) <= MAX_IDENTIFIER_LENGTH and _IDENTIFIER.fullmatch(value) is not None


def is_object_name(value: str) -> bool:
    """Whether ``value`` may name a replica, a group or a node: safe in a URL's path, at most 253 characters."""
    return len(value) <= MAX_OBJECT_NAME_LENGTH and _OBJECT_NAME.fullmatch(value) is not None
