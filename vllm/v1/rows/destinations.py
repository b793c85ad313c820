"""Where the rows of one request go: a small interface, and the tensors of a caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from vllm.v1.engine import ExtractionSpec
from vllm.v1.outputs import ExtractedRows
from vllm.v1.rows.leaving import STORAGE_DTYPES, Ints, RowForm, rows_slice


class RowDestination(Protocol):
    """Takes the rows of one request in their order, from one thread at a time.

    ``vllm.distributed.kv_transfer...hidden_states_file.HiddenStatesFile`` is one.
    """

    def append(self, rows: torch.Tensor) -> None:
        """The next rows [rows, layers, hidden], which were looked at."""
        ...

    def finish(self, token_ids: list[int]) -> None:
        """All rows are there: hand them over. ValueError: not one row for each token."""
        ...

    def discard(self) -> None:
        """Leave nothing behind."""
        ...


class CallerTensors:
    """The rows of one request as tensors of its own, filled step by step.

    num_tokens: of the prompt; the spec's positions are those of rows.
    """

    def __init__(
        self, spec: ExtractionSpec, num_tokens: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self.layer_ids = spec.layer_ids
        self.positions = _checked_positions(spec.positions, num_tokens)
        """Ascending."""
        if spec.storage_dtype is not None:
            dtype = STORAGE_DTYPES[spec.storage_dtype]
        self.form = RowForm(dtype)
        with torch.inference_mode(False):  # whoever gets them may want gradients behind them
            shape = (len(self.positions), len(self.layer_ids), hidden_size)
            self.extracted = self.form.empty(shape)

    def room(self, first: int, count: int) -> ExtractedRows:
        """Where rows ``first .. first + count - 1`` belong."""
        return rows_slice(self.extracted, slice(first, first + count))


def _checked_positions(positions: Sequence[int] | None, num_tokens: int) -> Ints:
    if positions is None:
        return np.arange(num_tokens)
    checked = np.asarray(positions, dtype=np.int64)
    is_ascending = checked.ndim == 1 and bool((np.diff(checked) > 0).all())
    if not is_ascending or (len(checked) and not 0 <= checked[0] <= checked[-1] < num_tokens):
        raise ValueError(f"positions of rows have to ascend in [0, {num_tokens})")
    return checked
