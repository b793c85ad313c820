"""Small helpers that belong to no package in particular."""

from __future__ import annotations

import uuid


def cdiv(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``."""
    return -(-a // b)


def random_uuid() -> str:
    """32 random hexadecimal digits."""
    return uuid.uuid4().hex
