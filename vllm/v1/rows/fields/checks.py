"""The last look at rows of hidden states before anybody gets them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm.exceptions import Failure, FailureKind


def largest_magnitudes(rows: torch.Tensor) -> torch.Tensor:
    """[rows, layers] of rows [rows, layers, hidden]: NaN where one is, infinite where one is.

    Works on any device, and makes no copy of the rows.
    """
    return torch.maximum(rows.amax(-1), -rows.amin(-1))


def find_bad_row(
    rows: torch.Tensor, layer_ids: Sequence[int], positions: Sequence[int]
) -> Failure | None:
    """Says which row cannot be right: not finite, or all zero (layer 0 may be: padding).

    rows: [rows, layers, hidden], of the tokens at ``positions``.
    """
    finite = torch.isfinite(rows).all(-1)  # [rows, layers]
    never_zero = torch.tensor([layer_id > 0 for layer_id in layer_ids])
    zero = (rows == 0).all(-1) & never_zero
    bad = (~finite | zero).nonzero()
    if not len(bad):
        return None
    row, column = bad[0].tolist()
    kind, what = FailureKind.ROWS_NOT_FINITE, "are not finite"
    if zero[row, column]:
        kind, what = FailureKind.ROWS_ALL_ZERO, "are all zero"
    where = f"token {positions[row]}, layer {layer_ids[column]}"
    return Failure(kind, f"hidden states of {where} {what}")
