"""Rows for the callers of requests: finding their tokens in a step, and sending them out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from vllm.model_executor.hook_points import HookPoint
from vllm.ops.row_transport import RowTransport
from vllm.utils.transfers import to_device
from vllm.v1.engine import ExtractionSpec, GenerationSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.rows.capture import CaptureTarget
from vllm.v1.rows.destinations import CallerTensors, GrowingTensors, PassingTensors
from vllm.v1.rows.fields.fp8 import FP8
from vllm.v1.rows.fields.hidden import STORAGE_DTYPES, HiddenStates
from vllm.v1.rows.fields.layout import Field, RowLayout
from vllm.v1.rows.fields.logprobs import LOGITS
from vllm.v1.rows.fields.requested import requested_fields
from vllm.v1.rows.leaving import BadRowsError, Ints, LeavingRows, RowMemory, send_rows
from vllm.v1.worker.input_batch import RequestState, StepBatch


class _Part(NamedTuple):
    """Rows of one request in one step."""

    req_id: str
    rows: CallerTensors
    first: int
    """Index of the first row among the request's rows."""
    start: int
    """Index of the first row in the staging tensor."""
    num_rows: int

    @property
    def room(self) -> dict[str, torch.Tensor]:
        return self.rows.room(self.first, self.num_rows)


class _Group:
    """Requests of a step that asked for the same layers in the same dtype, and the same fields."""

    def __init__(self, hidden: HiddenStates, layout: RowLayout, num_tokens: int) -> None:
        self.hidden = hidden
        self._layout = layout
        self._next_token_ids: Ints | None = None
        self.parts: list[_Part] = []
        self.num_rows = 0
        self.slots: Ints = np.full(num_tokens, -1)
        """[tokens]: row of the staging tensor, or -1."""
        self.memory: RowMemory

    def add(self, state: RequestState, rows: CallerTensors, first: int, tokens: Ints) -> None:
        """Add tokens of the batch, which give the request's rows from ``first`` on."""
        count = len(tokens)
        self.slots[tokens] = np.arange(self.num_rows, self.num_rows + count)
        self.parts.append(_Part(state.req_id, rows, first, self.num_rows, count))
        self.num_rows += count
        if any(field.source == LOGITS for field in self._layout.others):
            if self._next_token_ids is None:
                self._next_token_ids = np.full(len(self.slots), -1)
            self._next_token_ids[tokens] = state.tokens_after(rows.positions[first : first + count])

    def stage(self, device: torch.device) -> CaptureTarget:
        """Allocate memory for its rows. RuntimeError: not all of them will be captured."""
        captured = np.unique(self.slots[self.slots >= 0])
        if not np.array_equal(captured, np.arange(self.num_rows)):
            raise RuntimeError(
                f"{self.num_rows} rows of hidden states are to leave, but {len(captured)} tokens "
                "are computed for them"
            )
        layout = self._layout
        self.memory = RowMemory(layout.allocate(self.num_rows, device), self.hidden, layout)
        slots = to_device(self.slots, device)
        ids = self._next_token_ids
        following = None if ids is None else to_device(ids, device)
        return CaptureTarget(self.memory.row_cache, slots, self.hidden, layout, following)


class RowExtractor:
    """Finds the tokens whose rows requests want, and sends the rows to their callers."""

    def __init__(
        self,
        transport: RowTransport,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        vocab_size: int,
        find_hook: Callable[[str], HookPoint],
    ) -> None:
        self._find_hook = find_hook
        self._transport = transport
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._device = device
        self.fields: tuple[Field, ...] = ()
        """Fields that requests get besides hidden states; known once the model is loaded."""
        self._groups: list[_Group] = []
        self._ending: list[tuple[str, CallerTensors]] = []
        self._ended: dict[str, CallerTensors] = {}
        """Rows of requests that generated and have ended, until a step hands them over."""
        self._store = None if device.type == "cpu" else ThreadPoolExecutor(1, "rows-to-callers")
        """Puts rows that have left a device in their places, which may take as long as a step."""

    def make_rows(self, spec: ExtractionSpec, num_tokens: int) -> CallerTensors:
        """Make room for the rows that a new request asks for."""
        name = spec.storage_dtype
        stored = self._dtype if name is None else STORAGE_DTYPES[name]
        hidden = HiddenStates(spec.layer_ids, self._hidden_size, self._dtype, stored)
        sizes = (spec.top_logprobs, spec.logprob_temperature, self._vocab_size)
        fields = (
            *self.fields,
            *(self._find_hook(hook).field(hook, _stored(spec)) for hook in spec.hooks),
            *requested_fields(*sizes),
        )
        layout = RowLayout(hidden.cells, fields)
        if isinstance(spec, GenerationSpec):
            return GrowingTensors(hidden, layout, partial(_find_positions, spec))
        kind = PassingTensors if spec.in_parts else CallerTensors
        return kind(hidden, layout, spec.checked_positions(num_tokens))

    def end_request(self, req_id: str, rows: CallerTensors) -> None:
        """Take in that a request has ended: a step hands its rows over if it generated."""
        if rows.grows:
            self._ended[req_id] = rows

    def drop_step(self) -> None:
        """Forget a step that did not come to its end."""
        self._groups, self._ending = [], []

    def begin_step(self, batch: StepBatch) -> list[CaptureTarget]:
        """Return the targets of the rows that requests of the batch want."""
        ends = batch.num_computed + batch.num_scheduled
        self._ending = [
            (state.req_id, state.rows)
            for state, end in zip(batch.states, ends, strict=True)
            if state.rows is not None and not state.rows.grows and end == state.num_prompt_tokens
        ]
        groups: dict[tuple[HiddenStates, RowLayout], _Group] = {}
        for index, state in enumerate(batch.states):
            rows = state.rows
            if rows is None:
                continue
            computed = batch.num_computed[index]
            positions = rows.positions_before(int(ends[index]))
            first, last = np.searchsorted(positions, (computed, ends[index])).tolist()
            first = max(first, rows.num_sent)  # earlier rows were sent before a preemption
            if first >= last:
                continue
            rows.num_sent = last
            form = (rows.hidden, rows.layout)
            group = groups.setdefault(form, _Group(*form, batch.num_tokens))
            tokens = positions[first:last] - computed + batch.query_start[index]
            group.add(state, rows, first, tokens)
        self._groups = list(groups.values())
        return [group.stage(self._device) for group in self._groups]

    def end_step(self) -> RowsOfStep | None:
        """Start to bring the captured rows to the host; None when there is nothing to report."""
        groups, ending = self._groups, self._ending
        self._groups, self._ending = [], []
        leaving = []
        for group in groups:
            # On the CPU the rows go to each request's place at once; those of a device leave it
            # together, so that the work queued there does not depend on the number of requests.
            together = [[part] for part in group.parts] if self._store is None else [group.parts]
            leaving += [self._send(group, parts) for parts in together]
        if not (leaving or ending or self._ended):
            return None
        return RowsOfStep(leaving, ending, self._ended)

    def _send(self, group: _Group, parts: list[_Part]) -> _SentRows:
        """Send parts that follow each other in the staging tensor."""
        slots = np.arange(parts[0].start, parts[-1].start + parts[-1].num_rows)
        rows = send_rows(self._transport, group.memory, slots, [part.room for part in parts])
        arrive = rows.arrive if self._store is None else self._store.submit(rows.arrive).result
        return _SentRows(parts, rows, arrive)

    def shutdown(self) -> None:
        """End the thread, once all rows that were sent have arrived."""
        if self._store is not None:
            self._store.shutdown()


def _find_positions(spec: GenerationSpec, first: int, end: int) -> Ints:
    """Return the wanted positions below ``end``, int64, from the one of rank ``first`` on."""
    ranks = range(first, spec.rank(end))
    return np.array([spec.position_at(rank) for rank in ranks], dtype=np.int64)


def _stored(spec: ExtractionSpec) -> torch.dtype | None:
    """Return the dtype of activations on the host; None: the captured one."""
    stored = None if spec.storage_dtype is None else STORAGE_DTYPES[spec.storage_dtype]
    return None if stored is FP8 else stored


class _SentRows(NamedTuple):
    """Rows on their way to their places."""

    parts: list[_Part]
    rows: LeavingRows
    arrive: Callable[[], bool]
    """Waits for all of the rows."""


class RowsOfStep(NamedTuple):
    """Results of a step for requests that want rows for their callers."""

    leaving: list[_SentRows]
    ending: list[tuple[str, CallerTensors]]
    """Requests that have all their rows now, and the rows."""
    ended: dict[str, CallerTensors]
    """Requests that have ended, and their rows, which are removed when they are handed over."""

    def read(self, output: ModelRunnerOutput) -> None:
        """Wait for the rows; put the rows of requests that have all of theirs into ``output``."""
        for sent in self.leaving:
            sent.arrive()
            for part in sent.parts:
                if part.first != part.rows.num_arrived:
                    continue  # rows of an earlier step failed, and so has the request
                start = part.start - sent.parts[0].start
                place = slice(start, start + part.num_rows)
                positions = part.rows.positions[part.first : part.first + part.num_rows].tolist()
                try:
                    part.rows.append(sent.rows.take(place, part.room, positions))
                    if isinstance(part.rows, PassingTensors):
                        output.parts_of_rows[part.req_id] = part.rows.take(part.first)
                except BadRowsError as error:
                    output.failures[part.req_id] = error.failure
        ended = [(req_id, self.ended.pop(req_id)) for req_id in list(self.ended)]
        for req_id, rows in (*self.ending, *ended):
            if req_id in output.failures:
                continue
            try:
                output.extracted_rows[req_id] = rows.whole()
            except BadRowsError as error:
                output.failures[req_id] = error.failure
