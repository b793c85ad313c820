"""Kernel calls written down once and repeated: for the CPU what a CUDA graph is for a card.

A decode step of a small model is some hundred kernel calls of microseconds each; preparing
them in Python takes as long as a fifth of the weights takes to read. While a function is
recorded its kernel calls are not run but kept, with the addresses of their operands, and
repeated by one call of the library. Beside them a recorded function may only make tensors
and views, and look up embeddings.
"""

from __future__ import annotations

import math
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm.kernels.base import NotRecordableError, Replay

RunCalls = Callable[[bytes], None]
"""Runs kernel calls as :func:`pack_call` wrote them, one after another."""

Bytes = npt.NDArray[np.uint8]

_ALIGNMENT = 64
_CALL = struct.Struct("=2q")


def pack_call(operation: int, args: bytes) -> bytes:
    """``operation, len(args), args``, as ``vllm_cpu_run_all`` reads it."""
    return _CALL.pack(operation, len(args)) + args


class TensorMemory:
    """Memory for the tensors of recordings: reused as soon as no tensor stands in it.

    Recordings that are never repeated at the same time may share one.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[Bytes, Callable[[], object | None]]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor, not initialised. It and its views keep its memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        fitting = [
            (piece.nbytes, index)
            for index, (piece, user) in enumerate(self._pieces)
            if piece.nbytes >= num_bytes and user() is None
        ]
        index = min(fitting)[1] if fitting else len(self._pieces)
        piece = self._pieces[index][0] if fitting else _make_piece(num_bytes)
        part = piece[:num_bytes]  # torch keeps this object as long as the tensor's storage
        self._pieces[index : index + 1] = [(piece, weakref.ref(part))]
        return torch.from_numpy(part).view(dtype).view(torch.Size(shape))

    def let_go(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, whose memory may be reused although it is there."""
        address = tensor.untyped_storage().data_ptr()
        for piece, _ in self._pieces:
            if piece.ctypes.data == address:
                whole = torch.from_numpy(piece[: tensor.untyped_storage().nbytes()])
                return whole.view(tensor.dtype).as_strided(
                    tensor.shape, tensor.stride(), tensor.storage_offset()
                )
        return tensor  # it stands elsewhere


def _make_piece(num_bytes: int) -> Bytes:
    """At least so many bytes; of few sizes, so that batches that grow one by one fit into them."""
    size = 1 << (max(num_bytes, _ALIGNMENT) - 1).bit_length()
    whole = np.empty(size + _ALIGNMENT, dtype=np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + size]


class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what happens inside its block, on this thread."""

    def __init__(self, memory: TensorMemory, run_calls: RunCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._run_calls = run_calls
        self._parts: list[Callable[[], object]] = []
        self._calls: list[bytes] = []
        self._is_paused = False

    def add_call(self, operation: int, args: bytes) -> bool:
        """Keep a kernel call; False: it is to be run."""
        if not self._is_paused:
            self._calls.append(pack_call(operation, args))
        return not self._is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block everything is run and nothing kept."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def finish(self) -> Replay:
        """What repeats all of it."""
        self._end_calls()
        return partial(_repeat, tuple(self._parts), self._memory)

    def _end_calls(self) -> None:
        if self._calls:
            self._parts.append(partial(self._run_calls, b"".join(self._calls)))
            self._calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused or func is _WEIGHT_ADDRESS:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            raise NotRecordableError(f"{func} is no kernel of the library")
        if func is torch.ops.aten.new_empty.default:
            return self._memory.empty(args[1], kwargs.get("dtype") or args[0].dtype)
        result = func(*args, **kwargs)
        if func is torch.ops.aten.embedding.default:
            self._end_calls()
            self._parts.append(partial(torch.index_select, args[0], 0, args[1], out=result))
        elif not _is_view(result, args):
            raise NotRecordableError(f"{func} is no kernel of the library")
        return result


_WEIGHT_ADDRESS = getattr(getattr(torch.ops.mkldnn, "data_ptr", None), "default", None)
"""Tells where a weight in oneDNN's order lies; older torch has no such operation."""


def _repeat(parts: Sequence[Callable[[], object]], memory: TensorMemory) -> None:
    """Do all of it again; ``memory`` is kept as long as this may be asked for."""
    for part in parts:
        part()


def _is_view(result: object, args: Sequence[object]) -> bool:
    """Whether all that an operation returned is views of its arguments."""
    addresses = {
        x.untyped_storage().data_ptr()
        for x in tree_leaves(args)
        if isinstance(x, torch.Tensor) and not x.is_mkldnn
    }
    return all(
        isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() in addresses
        for x in tree_leaves(result)
    )


class _Active(threading.local):
    recorder: CallRecorder | None = None


_active = _Active()


def active_recorder() -> CallRecorder | None:
    """The recorder whose block this thread is in."""
    return _active.recorder


@contextmanager
def not_recorded() -> Iterator[None]:
    """Inside the block kernels run, whether or not the thread is recording."""
    recorder = _active.recorder
    if recorder is None:
        yield
    else:
        with recorder.paused():
            yield


class RecordedCalls:
    """Makes recordings, which share the memory of their tensors: no two may run at once."""

    def __init__(self, run_calls: RunCalls) -> None:
        self._run_calls = run_calls
        self._memory = TensorMemory()

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        """What repeats ``run``, and the tensor in which its result stands until the next one.

        ``run`` is called once, without its kernels: it computes nothing and changes nothing.
        Raises :class:`NotRecordableError`.
        """
        recorder = CallRecorder(self._memory, self._run_calls)
        _active.recorder = recorder
        try:
            with recorder:
                result = run()
        finally:
            _active.recorder = None
        return recorder.finish(), self._memory.let_go(result)
