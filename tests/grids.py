"""Grids of cases of which a few run by day, and all at night (``make test-all``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest

at_night = partial(pytest.param, marks=pytest.mark.exhaustive)
"""Arguments of a case that is left to the night."""


def grid(*axes: Iterable[Any], by_day: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Arguments for ``parametrize``: all combinations of ``axes``, ``by_day`` among them."""
    cases = list(itertools.product(*axes))
    assert all(case in cases for case in by_day), "by day runs what the night does not know"
    return [pytest.param(*case) if case in by_day else at_night(*case) for case in cases]
