"""Families on two ranks: a hybrid one with experts by day, at night all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.grids import at_night
from tests.models.families import FAMILIES
from tests.models.ranks_of_families import WAYS, checked, is_refusal, refused_families

BY_DAY = "qwen3_5_moe"


def check(name: str, folder: Path, way: str, model_impl: str = "auto") -> None:
    """Compare a family, or see that it is refused by the name of an option."""
    if name not in refused_families(way, model_impl):
        assert checked(name, folder, way, model_impl).startswith("rows")
        return
    with pytest.raises(ValueError) as refusal:
        checked(name, folder, way, model_impl)
    assert is_refusal(refusal.value, WAYS[way]), refusal.value


@pytest.mark.parametrize("way", ["tensor", *map(at_night, sorted(WAYS.keys() - {"tensor"}))])
@pytest.mark.parametrize("name", [BY_DAY, *map(at_night, sorted(FAMILIES.keys() - {BY_DAY}))])
def test_two_ranks_have_the_values_of_one(name: str, way: str, tmp_path: Path) -> None:
    check(name, tmp_path, way)


@pytest.mark.parametrize("way", [at_night("tensor"), at_night("stages")])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_modules_of_transformers_have_the_values_of_one_rank(
    name: str, way: str, tmp_path: Path
) -> None:
    check(name, tmp_path, way, "transformers")
