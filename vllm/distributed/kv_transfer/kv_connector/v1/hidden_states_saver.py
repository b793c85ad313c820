"""Worker side of the hidden-states connector: passes rows of the pool, checked, to the writers."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_options import HiddenStatesOptions
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_tracker import (
    HiddenStatesMetadata,
    RowRange,
)
from vllm.exceptions import Failure, FailureKind
from vllm.utils.transfers import prepare_pinned_pieces
from vllm.v1.outputs import SaveStats
from vllm.v1.rows.destinations import RowDestination
from vllm.v1.rows.leaving import Ints, LeavingRows, RowMemory, empty_rows, send_rows
from vllm.v1.rows.lock import take_lock
from vllm.v1.rows.writer import RequestWriter, RowBudget, disk_failure

if TYPE_CHECKING:
    from vllm.ops.row_transport import RowTransport

MAX_PIECE_BYTES = 8 << 20
_MAX_FILES_FINISHING = 64
_IDLE_WAIT_S = 0.005

OpenDestination = Callable[[str, int | None, int], RowDestination]
"""Begins the output of one request: its path, the descriptor of the lock that covers it
(``take_lock``; None: no lock), and ``RowRange.num_rows_known``."""


def split_into_pieces(
    ranges: Sequence[RowRange], rows_per_piece: int, rows_per_block: int
) -> Iterator[list[RowRange]]:
    """Yield all rows in order, in pieces; all pieces but the last are full."""
    piece: list[RowRange] = []
    room = rows_per_piece
    for rows in ranges:
        start = rows.start
        while start < rows.end:
            end = min(start + room, rows.end)
            piece.append(rows.part(start, end, rows_per_block))
            room -= end - start
            start = end
            if room == 0:
                yield piece
                piece, room = [], rows_per_piece
    if piece:
        yield piece


def slots_of(rows: RowRange, rows_per_block: int) -> Ints:
    """Return ``block * rows_per_block + row`` of each row."""
    positions = np.arange(rows.start, rows.end, dtype=np.int64)
    table_index, row = np.divmod(positions, rows_per_block)
    first_block = rows.start // rows_per_block
    blocks = np.asarray(rows.block_ids, dtype=np.int64)[table_index - first_block]
    slots: Ints = blocks * rows_per_block + row
    return slots


class RowSaver:
    """Sends the rows of each step to the host and tracks them until they are on disk.

    Only the engine's thread uses it.
    """

    def __init__(
        self,
        memory: RowMemory,
        transport: RowTransport,
        options: HiddenStatesOptions,
        open_destination: OpenDestination,
    ) -> None:
        self._memory = memory
        self._transport = transport
        self._options = options
        self._open_destination = open_destination
        row_cache, hidden, layout = memory
        self._rows_per_block = row_cache.shape[1]
        self._row_bytes = layout.row_bytes
        piece_bytes = min(MAX_PIECE_BYTES, options.max_bytes_in_flight)
        self._rows_per_piece = max(1, piece_bytes // self._row_bytes)
        self._is_pinned = row_cache.device.type == "cuda"
        if self._is_pinned:  # pin all memory now, so that no step calls the driver for it
            piece_bytes = self._rows_per_piece * hidden.cells.num_bytes
            count = options.max_bytes_in_flight // (self._rows_per_piece * self._row_bytes)
            prepare_pinned_pieces(piece_bytes, max(1, count))
        self._budget = RowBudget(options.max_bytes_in_flight, _MAX_FILES_FINISHING)
        self._threads = ThreadPoolExecutor(
            options.num_writer_threads, thread_name_prefix="hidden-states-writer"
        )
        self._changed: queue.SimpleQueue[RequestWriter] = queue.SimpleQueue()
        self._writers: dict[str, RequestWriter] = {}
        self._reported: dict[str, RequestWriter] = {}
        """Writers of :meth:`take_finished`, until the scheduler side has taken the report: it may
        discard their requests before."""
        self._finishing: set[str] = set()
        self._without_rows: set[str] = set()
        """Requests that ended before any of their rows were computed."""
        self._failures: dict[str, Failure] = {}

    def save(self, ranges: Sequence[RowRange]) -> None:
        """Send these rows to the host; the pool may be overwritten on return.

        Waits while too many bytes are being written to disk.
        """
        writable = [rows for rows in ranges if self._writer_of(rows).failure is None]
        for piece in split_into_pieces(writable, self._rows_per_piece, self._rows_per_block):
            self._save_piece(piece)

    def end_requests(self, metadata: HiddenStatesMetadata) -> None:
        """Complete the files of finished requests, and remove those of discarded ones."""
        for request_id, token_ids in metadata.finished.items():
            self._finishing.add(request_id)
            writer = self._writers.get(request_id)
            if writer is not None:
                writer.finish(token_ids)
            else:
                self._without_rows.add(request_id)
        for request_id in metadata.discarded:
            writer = self._writers.get(request_id) or self._reported.get(request_id)
            if writer is not None:
                writer.discard()
                if request_id not in self._finishing:  # else its end is still reported
                    self._writers.pop(request_id, None)
        for request_id in metadata.taken:
            self._reported.pop(request_id, None)

    def take_finished(self, nothing_else_to_do: bool) -> set[str]:
        """Return the requests whose file is complete, or has failed, since the last call.

        With nothing else to do, waits a moment for one.
        """
        done, self._without_rows = self._without_rows, set()
        message = "no rows of hidden states were computed"
        for request_id in done:
            self._failures[request_id] = Failure(FailureKind.CONNECTOR_FAILED, message)
        wait_s = _IDLE_WAIT_S if nothing_else_to_do and self._finishing and not done else 0.0
        while (writer := self._next_changed(wait_s)) is not None:
            wait_s = 0.0
            request_id = writer.request_id
            if self._writers.get(request_id) is not writer:
                continue  # discarded meanwhile
            if writer.failure is not None:
                self._failures[request_id] = writer.failure
            if writer.is_over:
                self._reported[request_id] = self._writers.pop(request_id)
                done.add(request_id)
        self._finishing -= done
        return done

    def take_failures(self) -> dict[str, Failure]:
        """Return request id -> reason of the failures seen by :meth:`take_finished`."""
        failures, self._failures = self._failures, {}
        return failures

    def stats(self) -> SaveStats:
        """Return what was written so far, and what is still to be written."""
        return self._budget.stats()

    def shutdown(self) -> None:
        """Complete the files of requests that ended, and remove the others."""
        for request_id, writer in self._writers.items():
            if request_id not in self._finishing:
                writer.discard()
        self._writers.clear()
        self._threads.shutdown()

    def _next_changed(self, wait_s: float) -> RequestWriter | None:
        try:
            return self._changed.get(block=wait_s > 0, timeout=wait_s or None)
        except queue.Empty:
            return None

    def _writer_of(self, rows: RowRange) -> RequestWriter:
        writer = self._writers.get(rows.request_id)
        if writer is None:
            writer = self._writers[rows.request_id] = self._begin(rows)
        return writer

    def _begin(self, rows: RowRange) -> RequestWriter:
        """Make the writer of a new request, with its lock; an error is the writer's failure."""
        path, num_rows = rows.path, rows.num_rows_known
        self._budget.wait_for_files()
        lock, failure = None, None
        try:
            self._options.check_save_path(path)
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            if self._options.use_synchronization_lock:
                lock = take_lock(path)
        except OSError as error:
            failure = disk_failure(path, error)
        except ValueError as error:
            failure = Failure(FailureKind.CONNECTOR_FAILED, str(error))
        except RecursionError:
            message = f"the folders of {path} cannot be made; choose a path with fewer of them"
            failure = Failure(FailureKind.WRITE_FAILED, message)
        writer = RequestWriter(
            rows.request_id,
            path,
            lambda: self._open_destination(path, lock, num_rows),
            lock,
            self._memory.layout,
            self._threads,
            self._budget,
            self._changed,
        )
        if failure is not None:
            writer.fail(failure)
        return writer

    def _save_piece(self, piece: list[RowRange]) -> None:
        num_rows = sum(len(rows) for rows in piece)
        num_bytes = (self._rows_per_piece if self._is_pinned else num_rows) * self._row_bytes
        self._budget.take_bytes(num_bytes)
        free = partial(self._budget.return_bytes, num_bytes)
        try:
            leaving, room = self._send(piece, num_rows)
        except BaseException:
            free()
            raise
        leaving.share(len(piece), free)
        start = 0
        for rows in piece:
            place = slice(start, start + len(rows))
            start = place.stop
            hidden = {name: tensor[place] for name, tensor in room.items()}
            arrive = partial(leaving.take, place, hidden, range(rows.start, rows.end))
            self._writers[rows.request_id].append(arrive, leaving.drop)

    def _send(
        self, piece: list[RowRange], num_rows: int
    ) -> tuple[LeavingRows, dict[str, torch.Tensor]]:
        """Send the rows of a piece to the host; returns them and the room for their hidden states
        there."""
        # All pinned pieces have one size.
        num_rows_of_room = self._rows_per_piece if self._is_pinned else num_rows
        room = empty_rows(self._memory.hidden.forms, num_rows_of_room, pinned=self._is_pinned)
        room = {name: tensor[:num_rows] for name, tensor in room.items()}
        slots = np.concatenate([slots_of(rows, self._rows_per_block) for rows in piece])
        return send_rows(self._transport, self._memory, slots, [room]), room
