"""Entries of configs are read as transformers reads them; see config_fields.py."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.models.config_fields import Case, cases, differs
from tests.models.families import FAMILIES

BY_DAY = 3
"""Cases of a family."""


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "nemotron_h", "deepseek_v3", "gemma4"])
def test_entries_are_read_as_transformers_reads_them(family: str, tmp_path: Path) -> None:
    check(cases([family])[:BY_DAY], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_entry_is_read_as_transformers_reads_it(family: str, tmp_path: Path) -> None:
    check(cases([family]), tmp_path)


def check(found: list[Case], folder: Path) -> None:
    wrong = []
    for number, case in enumerate(found):
        with suppress(ValueError):  # refused
            difference = differs(case, folder / str(number))
            wrong += [(case, difference)] if difference else []
    assert not wrong
