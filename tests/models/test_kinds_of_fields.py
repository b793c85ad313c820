"""All fields of a row in every kind of run: a hybrid family by day, at night all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.grids import at_night
from tests.models.families import FAMILIES
from tests.models.kinds_of_fields import FIELD_KINDS, Fields
from tests.models.kinds_of_run import problems_of

BY_DAY = "qwen3_5_moe"


@pytest.mark.parametrize("name", [BY_DAY, *map(at_night, sorted(FAMILIES.keys() - {BY_DAY}))])
def test_every_kind_of_run_has_every_field(name: str, tmp_path: Path) -> None:
    assert problems_of(name, tmp_path, FIELD_KINDS, Fields) == {}
