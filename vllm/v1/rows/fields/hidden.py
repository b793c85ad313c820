"""Hidden states: the residual stream at the boundaries of layers, in a dtype or as fp8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from vllm.exceptions import Failure
from vllm.forward_context import HIDDEN_STATES
from vllm.utils.boundaries import LayerId
from vllm.v1.rows.fields.checks import find_bad_row
from vllm.v1.rows.fields.fp8 import FP8, dequantize_rows, quantization_errors, quantize_rows
from vllm.v1.rows.fields.layout import Cells, Field, TensorForm

STORAGE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": FP8,
}
"""Dtypes in which hidden states may be stored, by their names in options."""


@dataclass(frozen=True)
class HiddenStates(Field):
    """The stream at ``layer_ids``, in their order; duplicates have a column each."""

    name: ClassVar[str] = HIDDEN_STATES
    tensor_names: ClassVar[tuple[str, ...]] = (HIDDEN_STATES, "scales", "fp8_errors")

    layer_ids: tuple[LayerId, ...]
    hidden_size: int
    dtype: torch.dtype
    """Dtype in which the stream is captured."""
    stored: torch.dtype
    """Dtype on the host; fp8 has a scale for each row and layer."""

    @cached_property
    def cells(self) -> Cells:
        return Cells(self.dtype, len(self.layer_ids), self.hidden_size)

    @cached_property
    def boundaries(self) -> frozenset[LayerId]:
        return frozenset(self.layer_ids)

    @cached_property
    def _columns(self) -> Mapping[LayerId, list[int]]:
        columns: dict[LayerId, list[int]] = {}
        for column, layer_id in enumerate(self.layer_ids):
            columns.setdefault(layer_id, []).append(column)
        return columns

    def columns_of(self, index: LayerId) -> Sequence[int]:
        return self._columns.get(index, ())

    def encode(self, *values: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, residual = values
        # A model may keep its stream in float32 and compute in another dtype.
        return hidden.to(self.dtype), residual

    @property
    def is_cast(self) -> bool:
        """True if the dtype on the host differs from the captured one."""
        return self.stored is not self.dtype

    @property
    def forms(self) -> dict[str, TensorForm]:
        columns = (len(self.layer_ids),)
        forms = {HIDDEN_STATES: TensorForm(self.stored, (*columns, self.hidden_size))}
        if self.stored is FP8:
            forms |= dict.fromkeys(("scales", "fp8_errors"), TensorForm(torch.float32, columns))
        return forms

    def decode(self, cells: torch.Tensor) -> dict[str, torch.Tensor]:
        """Convert cells, or [cells, 1, hidden], to the stored dtype on their own device."""
        if self.stored is not FP8:
            return {HIDDEN_STATES: cells.to(self.stored)}
        values, scales = quantize_rows(cells)
        errors = quantization_errors(cells, values, scales)
        return {HIDDEN_STATES: values, "scales": scales, "fp8_errors": errors}

    def find_fault(
        self, tensors: Mapping[str, torch.Tensor], positions: Sequence[int]
    ) -> Failure | None:
        """Find a row that is not finite, or all zero; layer 0 may be zero (padding)."""
        values = tensors[HIDDEN_STATES]
        if self.stored is FP8:
            values = dequantize_rows(values, tensors["scales"])
        problem = find_bad_row(values, self.layer_ids, positions)
        if problem is not None and self.stored is torch.float16:
            return Failure(problem.kind, f"{problem} (as float16, which ends at 65,504)")
        return problem

    def not_put(self, indexes: Sequence[LayerId], num_told: int, num_tokens: int) -> str:
        return (
            f"the model did not hand over the hidden states of layers {list(indexes)}: it "
            "has to run its layers through run_decoder_layers or implement SupportsEagle3"
        )
