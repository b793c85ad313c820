"""The last check of rows of hidden states before they are handed out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm.exceptions import Failure, FailureKind
from vllm.utils.boundaries import LayerId


def largest_magnitudes(rows: torch.Tensor) -> torch.Tensor:
    """Largest magnitudes [rows, layers] of rows [rows, layers, hidden]; NaN and infinity stay.

    Works on any device, and makes no copy of the rows.
    """
    return torch.maximum(rows.amax(-1), -rows.amin(-1))


def find_bad_row(
    rows: torch.Tensor, layer_ids: Sequence[LayerId], positions: Sequence[int]
) -> Failure | None:
    """Find a row that cannot be right: not finite, or all zero (layer 0 may be: padding).

    rows: [rows, layers, hidden], of the tokens at ``positions``.
    """
    finite = torch.isfinite(rows).all(-1)  # [rows, layers]
    never_zero = torch.tensor([layer_id != 0 for layer_id in layer_ids], dtype=torch.bool)
    zero = (rows == 0).all(-1) & never_zero
    bad = (~finite | zero).nonzero()
    if not len(bad):
        return None
    row, column = bad[0].tolist()
    kind, fault = FailureKind.ROWS_NOT_FINITE, "are not finite"
    if zero[row, column]:
        kind, fault = FailureKind.ROWS_ALL_ZERO, "are all zero"
    where = f"token {positions[row]}, layer {layer_ids[column]}"
    return Failure(kind, f"hidden states of {where} {fault}")
