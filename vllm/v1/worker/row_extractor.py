"""Rows that requests hand to their callers: from the forward pass to host memory.

    wanted tokens of the step -> staging [rows, layers, hidden], one for each list of layers
                              -> looked at, cast -> the request's own tensors

What was not asked for is dropped at the layer boundary; nothing here touches the pool.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch

from vllm.hidden_states.fp8 import FP8, quantization_errors, quantize_rows
from vllm.kernels.base import Kernels
from vllm.utils.row_checks import find_bad_row
from vllm.v1.engine import ExtractionSpec
from vllm.v1.outputs import ExtractedRows, ModelRunnerOutput
from vllm.v1.spec_decode.row_sink import CheckedRowSink
from vllm.v1.worker.input_batch import Ints, RequestState, StepBatch
from vllm.v1.worker.transfers import to_device

STORAGE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": FP8,
}


class RequestRows:
    """The rows of one request, in host memory; filled step by step."""

    def __init__(
        self, spec: ExtractionSpec, num_tokens: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self.layer_ids = spec.layer_ids
        self.positions: Ints = np.arange(num_tokens)
        if spec.positions is not None:
            self.positions = np.asarray(spec.positions, dtype=np.int64)
        if spec.storage_dtype is not None:
            dtype = STORAGE_DTYPES[spec.storage_dtype]
        shape = (len(self.positions), len(self.layer_ids), hidden_size)
        self.extracted = ExtractedRows(torch.empty(shape, dtype=dtype))
        if dtype is FP8:
            self.extracted.scales = torch.empty(shape[:2])
            self.extracted.fp8_errors = torch.empty(shape[:2])

    def store(self, place: slice, rows: torch.Tensor) -> None:
        """Cast rows [rows, layers, hidden] of the model's dtype and keep them."""
        extracted = self.extracted
        if extracted.scales is None:
            extracted.hidden_states[place].copy_(rows)
            return
        values, scales = quantize_rows(rows)
        extracted.fp8_errors[place].copy_(quantization_errors(rows, values, scales))
        extracted.hidden_states[place].copy_(values)
        extracted.scales[place].copy_(scales)


class _Part(NamedTuple):
    """Rows of one request in one step."""

    req_id: str
    rows: RequestRows
    first: int
    """Index of the first among the request's rows."""
    start: int
    """Index of the first in the staging tensor."""
    num_rows: int


class _Group:
    """Requests of a step that asked for the same layers."""

    def __init__(self, layer_ids: tuple[int, ...]) -> None:
        self.layer_ids = layer_ids
        self.parts: list[_Part] = []
        self.num_rows = 0
        self.staging: torch.Tensor  # [1, rows, layers, hidden]
        self.slots: torch.Tensor  # int64 [tokens]: row of the staging tensor, or -1


class RowExtractor(CheckedRowSink):
    """The row sink of steps in which requests want rows for themselves."""

    def __init__(
        self, kernels: Kernels, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(frozenset())
        self._kernels = kernels
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._groups: list[_Group] = []
        self._columns: dict[int, list[tuple[_Group, int]]] = {}
        self._ending: list[RequestState] = []

    def make_rows(self, spec: ExtractionSpec, num_tokens: int) -> RequestRows:
        """Room for what a new request asks for."""
        return RequestRows(spec, num_tokens, self._hidden_size, self._dtype)

    def begin_step(self, batch: StepBatch) -> bool:
        """Find out which tokens of the batch are wanted; False: none."""
        self._begin()
        ends_of_requests = batch.num_computed + batch.num_scheduled
        self._ending = [
            state
            for state, end in zip(batch.states, ends_of_requests, strict=True)
            if state.rows is not None and end == state.num_prompt_tokens
        ]
        groups: dict[tuple[int, ...], _Group] = {}
        slots: dict[tuple[int, ...], Ints] = {}
        for index, state in enumerate(batch.states):
            if state.rows is None:
                continue
            computed, query_start = batch.num_computed[index], batch.query_start[index]
            ends = (computed, computed + batch.num_scheduled[index])
            first, last = np.searchsorted(state.rows.positions, ends)
            if first == last:
                continue
            layer_ids = state.rows.layer_ids
            if layer_ids not in groups:
                groups[layer_ids] = _Group(layer_ids)
                slots[layer_ids] = np.full(batch.num_tokens, -1)
            group = groups[layer_ids]
            count = int(last - first)
            tokens = state.rows.positions[first:last] - computed + query_start
            slots[layer_ids][tokens] = np.arange(group.num_rows, group.num_rows + count)
            group.parts.append(_Part(state.req_id, state.rows, int(first), group.num_rows, count))
            group.num_rows += count
        for layer_ids, group in groups.items():
            shape = (1, group.num_rows, len(layer_ids), self._hidden_size)
            group.staging = torch.empty(shape, dtype=self._dtype, device=self._device)
            group.slots = to_device(slots[layer_ids], self._device)
        self._groups = list(groups.values())
        self._columns = self._columns_by_layer()
        self.layer_ids = frozenset(self._columns)
        return bool(self._groups)

    def _columns_by_layer(self) -> dict[int, list[tuple[_Group, int]]]:
        columns = defaultdict(list)
        for group in self._groups:
            for column, layer_id in enumerate(group.layer_ids):
                columns[layer_id].append((group, column))
        return dict(columns)

    def _store(self, layer_id: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        for group, column in self._columns[layer_id]:
            self._kernels.capture_rows(group.staging, group.slots, column, hidden, residual)

    def collect(self, output: ModelRunnerOutput) -> None:
        """Hand the step's rows to their requests; those that are complete go into ``output``."""
        groups, self._groups, self._columns = self._groups, [], {}
        for group in groups:
            for part in group.parts:
                failure = self._store_part(group, part)
                if failure is not None:
                    output.failures[part.req_id] = failure
        for state in self._ending:
            if state.rows is not None and state.req_id not in output.failures:
                output.extracted_rows[state.req_id] = state.rows.extracted

    def _store_part(self, group: _Group, part: _Part) -> str | None:
        """Bring the rows to the host and look at them; says what is wrong with them."""
        rows, place = part.rows, slice(part.first, part.first + part.num_rows)
        host = rows.extracted.hidden_states[place]
        if host.dtype != self._dtype:
            host = torch.empty_like(host, dtype=self._dtype)
        slots = torch.arange(part.start, part.start + part.num_rows, device=self._device)
        report = self._kernels.gather_rows(group.staging, slots, host)
        if report.nonfinite_row >= 0 or report.zero_row >= 0:
            failure = find_bad_row(host, group.layer_ids, rows.positions[place].tolist())
            if failure is not None:
                return failure
        if host.dtype != rows.extracted.hidden_states.dtype:
            rows.store(place, host)
        return None
