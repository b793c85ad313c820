"""Entries of configs are read as transformers reads them; see config_fields.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.config_fields import Case, Finding, cases, examine
from tests.models.families import FAMILIES

BY_DAY = 3
"""Cases of a family that both can run."""


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "nemotron_h", "deepseek_v3", "gemma4"])
def test_entries_are_read_as_transformers_reads_them(family: str, tmp_path: Path) -> None:
    found = findings(cases([family]), tmp_path)
    compared = (pair for pair in found if pair[1].outcome in ("right", "differs"))
    check(list(itertools.islice(compared, BY_DAY)), at_least=BY_DAY)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_entry_is_read_as_transformers_reads_it(family: str, tmp_path: Path) -> None:
    found = list(findings(cases([family]), tmp_path))
    check(found, at_least=len(found) // 2)


def findings(tried: list[Case], folder: Path) -> Iterator[tuple[Case, Finding]]:
    return ((case, examine(case, folder / str(i))) for i, case in enumerate(tried))


def check(found: list[tuple[Case, Finding]], at_least: int) -> None:
    """None differs, and so many are right."""
    assert not [pair for pair in found if pair[1].outcome == "differs"]
    assert sum(finding.outcome == "right" for _, finding in found) >= at_least
