"""Transfer of rows from a device to the host: copied, checked and cast beside the computation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from vllm.exceptions import FailureError
from vllm.ops.row_transport import PendingReport, RowTransport
from vllm.utils.transfers import HostCopy, to_device
from vllm.v1.outputs import ExtractedRows
from vllm.v1.rows.fields.fp8 import DEVICE_VALUES_AT_ONCE, FP8, rows_at_once
from vllm.v1.rows.fields.hidden import HiddenStates
from vllm.v1.rows.fields.layout import RowLayout, TensorForm

if TYPE_CHECKING:
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"

LARGEST_PIECE_BYTES = DEVICE_VALUES_AT_ONCE * torch.float32.itemsize
"""The most pinned memory on the host into which one copy of rows from a device goes."""


class BadRowsError(FailureError):
    """Rows that must not be handed out: the message says which."""


class RowMemory(NamedTuple):
    """Rows in the pool or in a staging tensor, and the fields that they hold."""

    row_cache: torch.Tensor
    """Hidden states, strided view [blocks, rows_per_block, layers, hidden]."""
    hidden: HiddenStates
    layout: RowLayout


def empty_rows(
    forms: dict[str, TensorForm], num_rows: int, *, pinned: bool = False
) -> dict[str, torch.Tensor]:
    """Tensors [num_rows, ...] on the host, uninitialised."""
    return {
        name: torch.empty((num_rows, *form.shape), dtype=form.dtype, pin_memory=pinned)
        for name, form in forms.items()
    }


class _Cast(NamedTuple):
    """A piece of the hidden states, [cells, 1, hidden], that is cast at a time."""

    first: int
    report: PendingReport
    copies: dict[str, HostCopy]


class LeavingRows:
    """Rows of consecutive slots on their way to the host; any thread may wait for them.

    outs: consecutive tensors of the hidden states' forms, for all rows together. The memory from
    which the rows are copied stays until they have arrived.
    """

    def __init__(
        self,
        memory: RowMemory,
        outs: Sequence[dict[str, torch.Tensor]],
        pieces: Iterator[_Cast],
        source: torch.Tensor,
        rest: HostCopy | None,
    ) -> None:
        _, self._hidden, self._layout = memory
        self._outs = outs
        self._pieces = pieces
        self._source: torch.Tensor | None = source
        self._rest = rest
        self._others: dict[str, torch.Tensor] = {}
        self._is_good: bool | None = None
        self._changing = threading.Lock()
        self._num_users = 0
        self._free: Callable[[], None] = _do_nothing

    def share(self, num_users: int, free: Callable[[], None]) -> None:
        """Call ``free`` once ``num_users`` users have dropped the rows."""
        self._num_users, self._free = num_users, free

    def drop(self) -> None:
        """Note that one of the users is done."""
        with self._changing:
            self._num_users -= 1
            is_last = self._num_users == 0
        if is_last:
            self._free()

    @torch.inference_mode()
    def arrive(self) -> bool:
        """Wait for the rows; return whether a check of all hidden states found nothing bad."""
        with self._changing:
            if self._is_good is None:
                self._is_good = self._wait()
                self._source = None
            return self._is_good

    def _wait(self) -> bool:
        """Put all pieces in place. At most two are on their way at a time, so that later pieces
        come in the memory of earlier ones."""
        is_good = True
        piece = next(self._pieces, None)
        while piece is not None:
            following = next(self._pieces, None)  # it comes while this one is put in place
            is_good &= piece.report.result().is_good
            for name, copy in piece.copies.items():
                targets = [out[name] for out in self._outs]
                _put_in_place(copy.result().squeeze(1), piece.first, targets)
            piece = following
        if self._rest is not None:
            self._others = self._layout.decode(self._rest.result())
        return is_good

    def take(
        self, place: slice, hidden: dict[str, torch.Tensor], positions: Sequence[int]
    ) -> ExtractedRows:
        """Wait for some of the rows; returns them with all of their fields.

        place: their indices among all rows; hidden: their hidden states, in one of the outs;
        positions: those of their tokens. BadRowsError: they cannot be right.
        """
        is_good = self.arrive()
        others = {name: tensor[place] for name, tensor in self._others.items()}
        fault = None if is_good else self._hidden.find_fault(hidden, positions)
        fault = fault or self._layout.find_fault(others, positions)
        if fault is not None:
            raise BadRowsError(fault)
        return ExtractedRows(hidden | others, self._layout.constants)


def _do_nothing() -> None:
    pass


def _put_in_place(cells: torch.Tensor, first: int, targets: Sequence[torch.Tensor]) -> None:
    """Copy cells ``first, first + 1, ...`` into consecutive targets [rows, layers, ...]."""
    start = 0
    for target in targets:
        flat = target.flatten(0, 1)
        begin, end = max(first, start), min(first + len(cells), start + len(flat))
        if begin < end:
            flat[begin - start : end - start].copy_(cells[begin - first : end - first])
        start += len(flat)


def send_rows(
    transport: RowTransport,
    memory: RowMemory,
    slots: Ints,
    outs: Sequence[dict[str, torch.Tensor]],
) -> LeavingRows:
    """Start to bring the rows in ``slots`` to ``outs``, on the host, one after another.

    Hidden states that are not cast travel at once if the device may write to their only place.
    Others are cast on the device, 64 MiB at a time, when a thread waits for them, and then put in
    place. The work queued does not depend on the number of outs. All other fields travel in one
    copy.
    """
    row_cache, hidden, layout = memory
    first = outs[0][hidden.name]
    is_reachable = row_cache.device.type == "cpu" or first.is_pinned()
    rest = _send_rest(layout, row_cache, slots) if layout.others else None
    if not hidden.is_cast and is_reachable and len(outs) == 1:
        places = to_device(slots, row_cache.device)
        report = transport.gather(row_cache, places, first)
        return LeavingRows(memory, outs, iter([_Cast(0, report, {})]), row_cache, rest)
    rows = _dense_rows(row_cache, slots)
    pieces = _cast_in_pieces(transport, transport.beside(rows), rows, hidden)
    return LeavingRows(memory, outs, pieces, rows, rest)


def _cast_in_pieces(
    transport: RowTransport,
    beside: Callable[[], AbstractContextManager[None]],
    rows: torch.Tensor,
    hidden: HiddenStates,
) -> Iterator[_Cast]:
    cells = rows.flatten(0, 1)[:, None]  # [cells, 1, hidden]
    at_once = rows_at_once(cells.shape[1:], DEVICE_VALUES_AT_ONCE)
    for start in range(0, len(cells), at_once):
        part = cells[start : start + at_once]
        with beside():
            cast = hidden.decode(part)
            # Values beyond float16 become infinite; fp8 shows in its scales what was not finite.
            report = transport.inspect(part if hidden.stored is FP8 else cast[hidden.name])
            copies = {name: HostCopy(tensor) for name, tensor in cast.items()}
        del part, cast  # they are not needed while a thread waits for the piece
        yield _Cast(start, report, copies)


def _send_rest(layout: RowLayout, row_cache: torch.Tensor, slots: Ints) -> HostCopy:
    """int8 [rows, rest_bytes]: all fields but hidden states."""
    rest = layout.rest_of(row_cache)
    places, rows_per_block = to_device(slots, rest.device), rest.shape[1]
    return HostCopy(rest[places // rows_per_block, places % rows_per_block])


def _dense_rows(row_cache: torch.Tensor, slots: Ints) -> torch.Tensor:
    """[rows, layers, hidden]; rows that lie together are not copied."""
    rows_per_block = row_cache.shape[1]
    first, last = (int(slots[0]), int(slots[-1])) if len(slots) else (0, -1)
    together = last - first + 1 == len(slots) and first // rows_per_block == last // rows_per_block
    if together or not len(slots):
        start = first % rows_per_block
        return row_cache[first // rows_per_block, start : start + len(slots)]
    places = to_device(slots, row_cache.device)
    return row_cache[places // rows_per_block, places % rows_per_block]
