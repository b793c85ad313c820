"""Verdicts of every_family.py on rows in bfloat16."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import every_family
from tests.models.every_family import check_family, middle_row_error, nudge


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_beyond_the_limit_transformers_own_error_is_the_measure(
    noise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are twice as wrong as transformers' are not right, whatever the embeddings."""
    extracted = every_family._rows

    def noisy(*arguments: Any, **options: Any) -> list[torch.Tensor]:
        return [
            rows + noise * rows.std() * torch.randn(rows.shape).to(rows.dtype)
            if rows.dtype is torch.bfloat16
            else rows
            for rows in extracted(*arguments, **options)
        ]

    monkeypatch.setattr(every_family, "MOST_BFLOAT16_ERROR", 0.01)
    monkeypatch.setattr(every_family, "_rows", noisy)
    report = check_family("llama", tmp_path)
    assert report.outcome == ("wrong" if noise else "whole"), report.reason
    assert report.errors["bfloat16"] > 0.01
    assert (report.errors["nudged"] > 1.5 * report.errors["transformers nudged"]) == bool(noise)


def test_a_nudge_is_a_unit_in_the_last_place() -> None:
    weight = torch.randn(50, 40)
    rounded, nudged = weight.bfloat16(), nudge(weight, 3)
    assert nudged.dtype is torch.float32
    steps = nudged.bfloat16().view(torch.int16).int() - rounded.view(torch.int16).int()
    assert steps.abs().eq(1).all() and 800 < int((steps == 1).sum()) < 1200
    assert torch.equal(nudged, nudged.bfloat16().float())
    assert not torch.equal(nudged, nudge(weight, 4))
    assert nudge(torch.zeros(9), 0).isfinite().all()


def test_the_middle_row_counts_and_none_may_be_lost() -> None:
    expected = torch.full((5, 4), 2.0)
    rows = expected + torch.tensor([[0.0], [0.2], [0.4], [9.0], [9.0]])
    assert middle_row_error([[expected, rows]], [[expected, expected]]) == pytest.approx(0.2)
    rows[4, 1] = math.nan
    assert middle_row_error([[expected, rows]], [[expected, expected]]) == math.inf
