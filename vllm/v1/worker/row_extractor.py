"""Rows that requests hand to their callers: from the forward pass to host memory.

    wanted tokens of the step -> staging [rows, layers, hidden], one for each list of layers
                              -> looked at, cast, a few at a time -> the request's own tensors

What was not asked for is dropped at the layer boundary; nothing here touches the pool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm.exceptions import Failure
from vllm.hidden_states.fp8 import (
    DEVICE_VALUES_AT_ONCE,
    FP8,
    dequantize_rows,
    quantization_errors,
    quantize_rows,
    rows_at_once,
)
from vllm.ops.rows import PendingReport, RowTransport, capture_rows
from vllm.utils.row_checks import find_bad_row
from vllm.utils.transfers import HostCopy, to_device
from vllm.v1.engine import ExtractionSpec
from vllm.v1.outputs import ExtractedRows, ModelRunnerOutput
from vllm.v1.spec_decode.row_sink import CheckedRowSink
from vllm.v1.worker.input_batch import Ints, RequestState, StepBatch

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
        with torch.inference_mode(False):  # whoever gets them may want gradients behind them
            self.extracted = ExtractedRows(torch.empty(shape, dtype=dtype))
            if dtype is FP8:
                self.extracted.scales = torch.empty(shape[:2])
                self.extracted.fp8_errors = torch.empty(shape[:2])

    def cast(self, cells: torch.Tensor) -> list[torch.Tensor]:
        """Cells [cells, 1, hidden] of the model's dtype as they are kept, in the order of
        ``ExtractedRows``."""
        if self.extracted.scales is None:
            return [cells.to(self.extracted.hidden_states.dtype)]
        values, scales = quantize_rows(cells)
        return [values, scales, quantization_errors(cells, values, scales)]

    def store(self, first_cell: int, parts: Sequence[torch.Tensor]) -> None:
        """Keep what :meth:`cast` gave, from that cell of the request on."""
        extracted = self.extracted
        kept = (extracted.hidden_states, extracted.scales, extracted.fp8_errors)
        for target, part in zip(kept, parts, strict=False):
            target.flatten(0, 1)[first_cell : first_cell + len(part)].copy_(part.squeeze(1))

    def values(self, place: slice) -> torch.Tensor:
        """What was kept, fp8 as float32."""
        hidden_states, scales = self.extracted.hidden_states[place], self.extracted.scales
        return hidden_states if scales is None else dequantize_rows(hidden_states, scales[place])


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
        self, transport: RowTransport, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(frozenset())
        self._transport = transport
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._groups: list[_Group] = []
        self._columns: dict[int, list[tuple[_Group, int]]] = {}
        self._ending: list[RequestState] = []
        self._leaving: list[_LeavingRows] = []

    def make_rows(self, spec: ExtractionSpec, num_tokens: int) -> RequestRows:
        """Room for what a new request asks for."""
        return RequestRows(spec, num_tokens, self._hidden_size, self._dtype)

    def begin_step(self, batch: StepBatch) -> bool:
        """Find out which tokens of the batch are wanted; False: none."""
        self._begin()
        self._groups, self._columns, self._leaving = [], {}, []  # of a step that failed
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
            capture_rows(hidden, residual, group.slots, column, group.staging)

    def end_step(self) -> None:
        super().end_step()
        groups, self._groups, self._columns = self._groups, [], {}
        self._leaving = [self._send(group, part) for group in groups for part in group.parts]

    def take_step(self) -> RowsOfStep | None:
        """The rows of the step on their way to the host; None when nothing is to be told."""
        leaving, ending = self._leaving, self._ending
        self._leaving, self._ending = [], []
        return RowsOfStep(leaving, ending) if leaving or ending else None

    def _send(self, group: _Group, part: _Part) -> _LeavingRows:
        """Start to bring rows to the host, looked at and cast beside the computation."""
        rows, place = part.rows, slice(part.first, part.first + part.num_rows)
        staged = slice(part.start, part.start + part.num_rows)
        target = rows.extracted.hidden_states[place]
        if self._device.type == "cpu" and target.dtype == self._dtype:  # no copy in between
            slots = torch.arange(staged.start, staged.stop)
            report = self._transport.gather(group.staging, slots, target)
            return _LeavingRows(part, place, group.staging, [_LeavingCells(0, report, [])])
        cells = group.staging[0, staged].flatten(0, 1)[:, None]  # [cells, 1, hidden]
        at_once = rows_at_once(cells.shape[1:], DEVICE_VALUES_AT_ONCE)
        pieces = [
            self._send_cells(rows, cells[first : first + at_once], first)
            for first in range(0, len(cells), at_once)
        ]
        return _LeavingRows(part, place, group.staging, pieces)

    def _send_cells(self, rows: RequestRows, cells: torch.Tensor, first: int) -> _LeavingCells:
        """``cells`` [cells, 1, hidden] begin at ``first`` among those of the request's step."""
        with self._transport.beside(cells):
            parts = rows.cast(cells)
            # What float16 cannot hold is infinite there; fp8 shows what was not finite in scales.
            seen = parts[0] if rows.extracted.scales is None else cells
            report = self._transport.inspect(seen)
            return _LeavingCells(first, report, [HostCopy(tensor) for tensor in parts])


class _LeavingCells(NamedTuple):
    """As many of a request's rows, layer by layer, as are cast at a time."""

    first: int
    """Among those of the request in the step."""
    report: PendingReport
    copies: list[HostCopy]
    """Empty: they are in their place already."""


class _LeavingRows(NamedTuple):
    """Rows of one request between the device and its own tensors."""

    part: _Part
    place: slice
    staging: torch.Tensor
    """Where they come from; it stays until they have arrived."""
    pieces: list[_LeavingCells]

    def arrive(self) -> Failure | None:
        """Wait for them and put them in place; says what is wrong with them."""
        rows = self.part.rows
        is_good = True
        for piece in self.pieces:
            is_good &= piece.report.result().is_good
            first_cell = self.part.first * len(rows.layer_ids) + piece.first
            rows.store(first_cell, [copy.result() for copy in piece.copies])
        if is_good:
            return None
        kept = rows.values(self.place)
        problem = find_bad_row(kept, rows.layer_ids, rows.positions[self.place].tolist())
        if problem is not None and rows.extracted.hidden_states.dtype is torch.float16:
            problem = Failure(problem.kind, f"{problem} (as float16, which ends at 65,504)")
        return problem


class RowsOfStep(NamedTuple):
    """What a step gave to requests that want rows for themselves."""

    leaving: list[_LeavingRows]
    ending: list[RequestState]
    """Requests that have all their rows now."""

    def read(self, output: ModelRunnerOutput) -> None:
        """Wait for the rows; requests that have all of theirs go into ``output``."""
        for rows in self.leaving:
            failure = rows.arrive()
            if failure is not None:
                output.failures[rows.part.req_id] = failure
        for state in self.ending:
            if state.rows is not None and state.req_id not in output.failures:
                output.extracted_rows[state.req_id] = state.rows.extracted
