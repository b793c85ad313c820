"""Worker half of the hidden-states connector, at the pool: rows out, checked, to the writers."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_lock import FileLock
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_options import HiddenStatesOptions
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_tracker import (
    HiddenStatesMetadata,
    RowRange,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_writer import (
    Outcome,
    RequestWriter,
    RowBudget,
    disk_failure,
)
from vllm.exceptions import Failure, FailureKind
from vllm.utils.expert_trace import ExpertChoices, ExpertLayout, decode_choices
from vllm.utils.transfers import HostCopy, prepare_pinned_pieces, to_device
from vllm.v1.outputs import SaveStats
from vllm.v1.rows.destinations import RowDestination
from vllm.v1.rows.leaving import (
    Ints,
    LeavingRows,
    RowForm,
    check_choices,
    check_rows,
    rows_slice,
    send_rows,
)

if TYPE_CHECKING:
    from vllm.ops.row_transport import RowTransport

MAX_PIECE_BYTES = 8 << 20
_MAX_FILES_FINISHING = 64
_IDLE_WAIT_S = 0.005

OpenDestination = Callable[[str, FileLock | None, int], RowDestination]
"""Begins the output of one request: its path, the lock that covers it, and
``RowRange.num_rows_known``."""


class Segment(NamedTuple):
    """Rows of one request inside a piece."""

    rows: RowRange
    start: int
    """Position of the first token."""
    num_rows: int

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.num_rows)


def split_into_pieces(ranges: Sequence[RowRange], rows_per_piece: int) -> Iterator[list[Segment]]:
    """All rows in order, in pieces that are full but for the last."""
    piece: list[Segment] = []
    room = rows_per_piece
    for rows in ranges:
        start = rows.start
        while start < rows.end:
            count = min(room, rows.end - start)
            piece.append(Segment(rows, start, count))
            start += count
            room -= count
            if room == 0:
                yield piece
                piece, room = [], rows_per_piece
    if piece:
        yield piece


def slots_of(segment: Segment, rows_per_block: int) -> Ints:
    """``block * rows_per_block + row`` of each row of a segment."""
    positions = np.arange(segment.start, segment.start + segment.num_rows, dtype=np.int64)
    table_index, row = np.divmod(positions, rows_per_block)
    first_block = segment.rows.start // rows_per_block
    blocks = np.asarray(segment.rows.block_ids, dtype=np.int64)[table_index - first_block]
    slots: Ints = blocks * rows_per_block + row
    return slots


class RowSaver:
    """Brings the rows of each step to the host and follows them until they are on disk.

    ``row_cache``: strided view [blocks, rows_per_block, layers, hidden]; experts: of the traces
    behind its rows. Used by the engine's thread only.
    """

    def __init__(
        self,
        row_cache: torch.Tensor,
        transport: RowTransport,
        layer_ids: Sequence[int],
        options: HiddenStatesOptions,
        open_destination: OpenDestination,
        experts: ExpertLayout | None = None,
    ) -> None:
        self._row_cache = row_cache
        self._experts = experts
        self._traces = None if experts is None else experts.view(row_cache)
        self._transport = transport
        self._layer_ids = layer_ids
        self._options = options
        self._open_destination = open_destination
        self._form = RowForm(row_cache.dtype)
        self._row_bytes = row_cache[0, 0].numel() * row_cache.dtype.itemsize
        if self._traces is not None:
            self._row_bytes += self._traces[0, 0].numel() * self._traces.dtype.itemsize
        piece_bytes = min(MAX_PIECE_BYTES, options.max_bytes_in_flight)
        self._rows_per_piece = max(1, piece_bytes // self._row_bytes)
        self._is_pinned = row_cache.device.type == "cuda"
        if self._is_pinned:  # all that there will be: the driver is asked for none in a step
            row_bytes = row_cache[0, 0].nbytes
            count = options.max_bytes_in_flight // (self._rows_per_piece * self._row_bytes)
            prepare_pinned_pieces(self._rows_per_piece * row_bytes, max(1, count))
        self._budget = RowBudget(options.max_bytes_in_flight, _MAX_FILES_FINISHING)
        self._threads = ThreadPoolExecutor(
            options.num_writer_threads, thread_name_prefix="hidden-states-writer"
        )
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._writers: dict[str, RequestWriter] = {}
        self._finishing: set[str] = set()
        self._failures: dict[str, Failure] = {}

    def save(self, ranges: Sequence[RowRange]) -> None:
        """Bring these rows to the host; the pool may be overwritten on return.

        Waits while too many bytes are on their way to the disk.
        """
        wanted = [rows for rows in ranges if self._writer_of(rows).failure is None]
        for segments in split_into_pieces(wanted, self._rows_per_piece):
            self._save_piece(segments)

    def end_requests(self, metadata: HiddenStatesMetadata) -> None:
        """Complete or remove the files of requests that ended."""
        for request_id, token_ids in metadata.finished.items():
            self._finishing.add(request_id)
            writer = self._writers.get(request_id)
            if writer is not None:
                writer.finish(token_ids)
            else:
                message = "no rows of hidden states were computed"
                failure = Failure(FailureKind.CONNECTOR_FAILED, message)
                self._outcomes.put(Outcome(request_id, failure, finished=True))
        for request_id in metadata.discarded:
            writer = self._writers.get(request_id)
            if writer is not None:
                writer.discard()
                if request_id not in self._finishing:  # else its end is still reported
                    del self._writers[request_id]

    def take_finished(self, nothing_else_to_do: bool) -> set[str]:
        """Requests whose file is complete, or will not come, since the last call.

        With nothing else to do it waits a moment for one.
        """
        done: set[str] = set()
        wait_s = _IDLE_WAIT_S if nothing_else_to_do and self._finishing else 0.0
        while (outcome := self._next_outcome(wait_s)) is not None:
            wait_s = 0.0
            request_id = outcome.request_id
            if request_id not in self._writers and request_id not in self._finishing:
                continue  # discarded meanwhile
            if outcome.failure is not None:
                self._failures[request_id] = outcome.failure
            if outcome.finished:
                self._writers.pop(request_id, None)
                self._finishing.discard(request_id)
                done.add(request_id)
        return done

    def take_failures(self) -> dict[str, Failure]:
        """Request id -> reason, of the failures seen by :meth:`take_finished`."""
        failures, self._failures = self._failures, {}
        return failures

    def stats(self) -> SaveStats:
        """What was written so far, and what waits to be."""
        return self._budget.stats()

    def shutdown(self) -> None:
        """Complete the files of requests that ended, remove the others."""
        for request_id, writer in self._writers.items():
            if request_id not in self._finishing:
                writer.discard()
        self._writers.clear()
        self._threads.shutdown()

    def _next_outcome(self, wait_s: float) -> Outcome | None:
        try:
            return self._outcomes.get(block=wait_s > 0, timeout=wait_s or None)
        except queue.Empty:
            return None

    def _writer_of(self, rows: RowRange) -> RequestWriter:
        writer = self._writers.get(rows.request_id)
        if writer is None:
            writer = self._writers[rows.request_id] = self._begin(rows)
        return writer

    def _begin(self, rows: RowRange) -> RequestWriter:
        """The writer of a new request, with its lock taken; failed if that is not possible."""
        path, num_rows = rows.path, rows.num_rows_known
        self._budget.wait_for_files()
        lock, failure = None, None
        try:
            self._options.check_save_path(path)
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            if self._options.use_synchronization_lock:
                lock = FileLock(path)
        except OSError as error:
            failure = disk_failure(path, error)
        except ValueError as error:
            failure = Failure(FailureKind.CONNECTOR_FAILED, str(error))
        writer = RequestWriter(
            rows.request_id,
            path,
            lambda: self._open_destination(path, lock, num_rows),
            lock,
            self._threads,
            self._budget,
            self._outcomes,
        )
        if failure is not None:
            writer.fail(failure)
        return writer

    def _save_piece(self, segments: list[Segment]) -> None:
        num_rows = sum(segment.num_rows for segment in segments)
        num_bytes = (self._rows_per_piece if self._is_pinned else num_rows) * self._row_bytes
        self._budget.take_bytes(num_bytes)
        free = partial(self._budget.return_bytes, num_bytes)
        try:
            rows, traces = self._send(segments), self._send_traces(segments)
        except BaseException:
            free()
            raise
        piece = _Piece(rows, traces, len(segments), free)
        start = 0
        for segment in segments:
            place = slice(start, start + segment.num_rows)
            start = place.stop
            arrive = partial(self._arrive, segment, place, piece)
            writer = self._writers[segment.rows.request_id]
            writer.append(piece.out.hidden_states[place], arrive, piece.drop)

    def _arrive(self, segment: Segment, place: slice, piece: _Piece) -> ExpertChoices | None:
        """Wait until the rows are on the host; -> the choices of their experts, where traced.

        BadRowsError when they cannot be right.
        """
        is_good = piece.wait()
        rows = rows_slice(piece.out, place)
        check_rows(rows, is_good, self._layer_ids, segment.positions)
        if piece.traces is None:
            return None
        assert self._experts is not None
        choices = decode_choices(piece.traces.result()[place])
        check_choices(choices, self._experts, segment.positions)
        return choices

    def _send(self, segments: list[Segment]) -> LeavingRows:
        """Rows of all segments, on their way to the host."""
        _, _, num_layers, hidden_size = self._row_cache.shape
        slots = self._slots_of(segments)
        # Pinned memory is of one size, whatever is in it.
        num_rows = self._rows_per_piece if self._is_pinned else len(slots)
        room = self._form.empty((num_rows, num_layers, hidden_size), pinned=self._is_pinned)
        out = rows_slice(room, slice(len(slots)))
        return send_rows(self._transport, self._row_cache, slots, self._form, [out])

    def _send_traces(self, segments: list[Segment]) -> HostCopy | None:
        """Likewise those of their experts, if they are kept."""
        if self._traces is None:
            return None
        rows_per_block = self._traces.shape[1]
        places = to_device(self._slots_of(segments), self._traces.device)
        return HostCopy(self._traces[places // rows_per_block, places % rows_per_block])

    def _slots_of(self, segments: list[Segment]) -> Ints:
        rows_per_block = self._row_cache.shape[1]
        return np.concatenate([slots_of(segment, rows_per_block) for segment in segments])


class _Piece:
    """Rows of several requests in one host buffer, waited for once, by whichever thread comes
    first; ``free`` is called when the last user has dropped it."""

    def __init__(
        self, rows: LeavingRows, traces: HostCopy | None, num_users: int, free: Callable[[], None]
    ) -> None:
        self.rows = rows
        self.traces = traces
        (self.out,) = rows.outs
        self._num_users = num_users
        self._free = free
        self._is_good: bool | None = None
        self._changing = threading.Lock()

    def wait(self) -> bool:
        """Whether a look at all of them found nothing bad."""
        with self._changing:
            if self._is_good is None:
                self._is_good = self.rows.arrive()
            return self._is_good

    def drop(self) -> None:
        """One of the users is done."""
        with self._changing:
            self._num_users -= 1
            is_last = self._num_users == 0
        if is_last:
            self._free()
