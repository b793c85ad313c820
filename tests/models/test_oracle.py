"""Definition of an error in the comparisons with transformers."""

from __future__ import annotations

import math

import pytest
import torch

from tests.models.oracle import relative_error


def test_the_largest_error_in_units_of_what_is_expected() -> None:
    expected = torch.tensor([[3.0, -3.0], [3.0, 3.0]])
    assert relative_error(expected + torch.tensor([[0.0, 0.3], [-0.6, 0.0]]), expected) == (
        pytest.approx(0.2)
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_near(value: float) -> None:
    """Also as one of several errors, whose largest counts."""
    expected = torch.ones(2, 3)
    wrong = expected.clone()
    wrong[1, 2] = value
    assert max(relative_error(expected, expected), relative_error(wrong, expected)) == math.inf
    with pytest.raises(AssertionError, match="not finite"):
        relative_error(expected, wrong)


def test_rows_of_another_shape_are_no_rows_to_compare() -> None:
    with pytest.raises(AssertionError, match=r"\(1, 3\), not \(2, 3\)"):
        relative_error(torch.ones(1, 3), torch.ones(2, 3))
