"""Where the rows of one request go: a small interface, and the tensors of a caller."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch

from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states.records import STORAGE_DTYPES
from vllm.utils.expert_trace import ExpertChoices, ExpertLayout
from vllm.v1.engine import ExtractionSpec
from vllm.v1.outputs import ExtractedRows
from vllm.v1.rows.leaving import BadRowsError, RowForm, check_choices, rows_slice


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


@runtime_checkable
class TakesExperts(Protocol):
    """A destination that keeps traces of experts, too."""

    def append_experts(self, choices: ExpertChoices) -> None:
        """Those of the next rows, before the rows."""
        ...


class CallerTensors:
    """The rows of one request as tensors of its own, filled step by step.

    num_tokens: of the prompt; the spec's positions are those of rows.
    """

    def __init__(
        self,
        spec: ExtractionSpec,
        num_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        experts: ExpertLayout | None = None,
    ) -> None:
        self.layer_ids = spec.layer_ids
        self.positions = np.array(spec.checked_positions(num_tokens), dtype=np.int64)
        """Ascending."""
        if spec.storage_dtype is not None:
            dtype = STORAGE_DTYPES[spec.storage_dtype]
        self.form = RowForm(dtype)
        with torch.inference_mode(False):  # whoever gets them may want gradients behind them
            shape = (len(self.positions), len(self.layer_ids), hidden_size)
            self.extracted = self.form.empty(shape)
            if experts is not None:
                cells = (len(self.positions), len(experts.layer_ids), experts.top_k)
                self.extracted.expert_ids = torch.empty(cells, dtype=torch.int16)
                self.extracted.expert_weights = torch.empty(cells)
                self.extracted.expert_layers = torch.tensor(experts.layer_ids)
        self._experts = experts
        self._has_arrived = np.zeros(len(self.positions), dtype=np.bool_)

    def room(self, first: int, count: int) -> ExtractedRows:
        """Where rows ``first .. first + count - 1`` belong."""
        return rows_slice(self.extracted, slice(first, first + count))

    def take_experts(self, first: int, choices: ExpertChoices) -> None:
        """Those of the rows from ``first`` on. BadRowsError when they cannot be right."""
        assert self._experts is not None
        place = slice(first, first + len(choices.ids))
        check_choices(choices, self._experts, self.positions[place].tolist())
        self.extracted.expert_ids[place] = choices.ids
        self.extracted.expert_weights[place] = choices.weights

    def check_in(self, first: int, count: int) -> None:
        """These rows have arrived, and were looked at."""
        self._has_arrived[first : first + count] = True

    def whole(self) -> ExtractedRows:
        """All the rows. BadRowsError: one of them never came."""
        missing = self.positions[~self._has_arrived]
        if len(missing):
            message = (
                f"hidden states of {len(missing)} tokens were not computed, that of token "
                f"{missing[0]} for one"
            )
            raise BadRowsError(Failure(FailureKind.STEP_FAILED, message))
        return self.extracted
