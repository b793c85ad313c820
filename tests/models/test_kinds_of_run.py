"""Families in every kind of run: one by day, at night all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.grids import at_night
from tests.models.families import FAMILIES
from tests.models.kinds_of_run import KINDS, Family, problems_of

BY_DAY = "xlstm"


@pytest.mark.parametrize("name", [BY_DAY, *map(at_night, sorted(FAMILIES.keys() - {BY_DAY}))])
def test_every_kind_of_run_is_whole(name: str, tmp_path: Path) -> None:
    assert problems_of(name, tmp_path) == {}


def test_what_is_wrong_is_told_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two layers change places: nothing but their order is wrong."""
    checked = {kind: KINDS[kind] for kind in ("boundaries", "order", "layer 0")}
    monkeypatch.setattr("tests.models.kinds_of_run.KINDS", checked)
    extracted = Family.extracted

    def swapped(family: Family, llm: object, layers: list[int]) -> list[object]:
        rows = extracted(family, llm, layers)  # type: ignore[arg-type]
        in_order = layers == sorted(layers)
        return [row if in_order else row.flip(1) for row in rows]

    monkeypatch.setattr(Family, "extracted", swapped)
    assert list(problems_of("llama", tmp_path)) == ["order"]
