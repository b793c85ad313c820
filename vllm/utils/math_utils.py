"""Rounding of whole numbers."""

from __future__ import annotations

from vllm.utils import cdiv


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below ``number``."""
    return cdiv(number, multiple) * multiple


def round_down(number: int, multiple: int) -> int:
    """The largest multiple that is not above ``number``."""
    return number // multiple * multiple


def divisors(number: int) -> list[int]:
    """Return the divisors of a number above 0, in order."""
    return [one for one in range(1, number + 1) if number % one == 0]


__all__ = ["cdiv", "divisors", "round_down", "round_up"]
