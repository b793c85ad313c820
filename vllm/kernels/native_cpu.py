"""The kernels of ``csrc/cpu``, called through ctypes.

The library sees raw pointers, sizes and strides. Every call packs the fields of one
argument struct of ``csrc/cpu/abi.h``, in its order, into eight bytes each; that keeps a
call at some microseconds and is safe from any thread. The library chooses its
instruction set at run time and shares the OpenMP threads that torch has.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import IntEnum
from pathlib import Path

import torch
from torch.nn import functional

from vllm.kernels.base import (
    NotRecordableError,
    Record,
    RowReport,
    SequenceLayout,
    StatePlan,
    StateTensor,
)
from vllm.kernels.plain import copy_blocks, inspect_rows
from vllm.kernels.plain_linear import pack_weight, row_invariant_linear
from vllm.kernels.recorded_calls import (
    RecordedCalls,
    active_recorder,
    not_recorded,
)

LIBRARY_PATH = Path(__file__).with_name("_cpu_kernels.so")
ABI_VERSION = 8
ISA_NAMES = ("baseline", "avx2", "avx512", "avx512_bf16")
"""Instruction sets from lowest to highest, as ``VLLM_CPU_ISA`` names them."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STATUS = {
    1: "unknown operation, instruction set or size of the arguments",
    2: "dtype is not float32, bfloat16 or float16",
    3: "a slot, block id or position lies outside of its tensor",
    4: "out of memory",
}


class _Operation(IntEnum):
    """Operations in the order of ``csrc/cpu/abi.h``."""

    RMS_NORM = 0
    SILU_AND_MUL = 1
    SIGMOID_GATE = 2
    ROTARY_EMBEDDING = 3
    WRITE_KV = 4
    PAGED_ATTENTION = 5
    CAUSAL_CONV1D = 6
    GATED_DELTA_RULE = 7
    CAPTURE_ROWS = 8
    GATHER_ROWS = 9
    LINEAR = 10
    EMBEDDING = 11
    MOST_LIKELY = 12


# The argument structs: q an integer or a pointer, d a double.
_RMS_NORM = struct.Struct("=15q2d")
_SILU_AND_MUL = struct.Struct("=7q")
_SIGMOID_GATE = struct.Struct("=12q")
_ROTARY = struct.Struct("=17q")
_WRITE_KV = struct.Struct("=20q")
_ATTENTION = struct.Struct("=26q2d")
_CONV = struct.Struct("=22q")
_DELTA_RULE = struct.Struct("=38q")

_DELTA_CHUNK_TOKENS = 16
"""kDeltaChunkTokens of abi.h: tokens that the delta rule of 16-bit types takes at once."""
_CAPTURE_ROWS = struct.Struct("=17q")
_GATHER_ROWS = struct.Struct("=14q")
_LINEAR = struct.Struct("=11q")
_EMBEDDING = struct.Struct("=8q")
_MOST_LIKELY = struct.Struct("=7q")

_MAX_LINEAR_ROWS = 64
"""Rows of a product above which oneDNN is faster (and the kernel takes no more)."""
_MIN_LINEAR_COLUMNS = 16
_SUM_BLOCKS = (512, 1024)
"""Numbers of terms that oneDNN sums up before it adds them to the rest."""
_CHECKED_SUMS = 1024
"""Sums of a weight that are compared; one in ten differs when the order does (measured)."""
_CHECKED_TABLE_ROWS = 256
"""Rows of a packed table that are compared with those of the plain one."""


class NativeKernelsUnavailable(Exception):
    """The native kernels cannot be used; the message says why."""


def _open_library(path: Path) -> ctypes.CDLL:
    """The loaded library, checked. Raises :class:`NativeKernelsUnavailable`."""
    if not path.exists():
        raise NativeKernelsUnavailable(
            f"{path.name} was not built (was there a C++ compiler when vllm was installed?)"
        )
    try:
        library = ctypes.CDLL(str(path))
        version = library.vllm_cpu_abi_version()
    except (OSError, AttributeError) as error:
        raise NativeKernelsUnavailable(f"{path.name} cannot be loaded: {error}") from error
    if version != ABI_VERSION:
        raise NativeKernelsUnavailable(
            f"{path.name} is of another version ({version}, wanted {ABI_VERSION}): reinstall vllm"
        )
    return library


def _reuse_freed_memory() -> None:
    """Tell the C library's allocator to hand freed memory out again, however large.

    It gives blocks of 32 MiB and more back to the system at once, so that every step touches
    the outputs of its wide products for the first time: a tenth of the whole time, measured.
    """
    with suppress(AttributeError):  # a C library without these settings
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_MMAP_MAX, 0)
        set_option(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MOST_KEPT_BYTES = 512 * 2**20
"""Free memory at the end of the heap above which it goes back to the system."""


def _choose_isa(best: int, wanted: str | None) -> int:
    """Number of the instruction set ``wanted``, or the best. Raises ValueError."""
    if wanted is None:
        return best
    available = ISA_NAMES[: best + 1]
    if wanted not in available:
        raise ValueError(f"VLLM_CPU_ISA={wanted!r}: this CPU and build have {', '.join(available)}")
    return ISA_NAMES.index(wanted)


def _strides3(x: torch.Tensor) -> tuple[int, int, int, int, int]:
    """(outer, inner, n, outer stride, inner stride) of x as [outer, inner, n]."""
    shape, strides = x.shape, x.stride()
    assert strides[-1] == 1 or shape[-1] <= 1, "the last dimension must be contiguous"
    if len(shape) == 2:
        return shape[0], 1, shape[1], strides[0], 0
    if len(shape) == 3:
        return shape[0], shape[1], shape[2], strides[0], strides[1]
    assert len(shape) == 1, "at most three dimensions"
    return 1, 1, shape[0], 0, 0


def _rows_apart(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """New rows [rows, columns] for a kernel that reads the same columns of many of them.

    They lie an odd number of cache lines apart: rows that are 4 KiB apart, or a multiple, would
    drive each other out of a cache.
    """
    line = _CACHE_LINE_BYTES // like.itemsize
    lines = -(-columns // line) | 1
    return like.new_empty((rows, lines * line))[:, :columns]


_CACHE_LINE_BYTES = 64


def _is_row_dense(x: torch.Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] <= 1


class NativeCpuKernels:
    """Implements :class:`vllm.kernels.base.Kernels` for CPU tensors."""

    name = "native_cpu"

    def __init__(self, library: ctypes.CDLL, isa: str | None = None) -> None:
        """``isa``: one of :data:`ISA_NAMES` that this CPU has; None: the best."""
        run = library.vllm_cpu_run
        run.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int64]
        run.restype = ctypes.c_int
        self._run = run
        run_all = library.vllm_cpu_run_all
        run_all.argtypes = [ctypes.c_int, ctypes.c_int64, *run.argtypes[2:], ctypes.c_void_p]
        run_all.restype = ctypes.c_int
        self._run_all = run_all
        self._isa = _choose_isa(library.vllm_cpu_best_isa(), isa)
        self.isa = ISA_NAMES[self._isa]
        self.has_threads = bool(library.vllm_cpu_has_threads())
        self._sum_blocks: dict[tuple[torch.Size, bool, int], int | None] = {}

    @classmethod
    def load(cls, isa: str | None = None, path: Path = LIBRARY_PATH) -> NativeCpuKernels:
        """The kernels of the library at ``path``.

        Raises :class:`NativeKernelsUnavailable` when there is no library that works, and
        ValueError when ``isa`` is not one that this CPU and build have.
        """
        kernels = cls(_open_library(path), isa)
        _reuse_freed_memory()
        return kernels

    def _call(self, operation: _Operation, args: bytes) -> None:
        recorder = active_recorder()
        if recorder is not None and recorder.add_call(operation, args):
            return
        _check(operation, self._run(self._isa, operation, args, len(args)))

    def _run_calls(self, calls: bytes) -> None:
        operation = ctypes.c_int64()
        threads = torch.get_num_threads()
        status = self._run_all(self._isa, threads, calls, len(calls), ctypes.addressof(operation))
        _check(operation.value, status)

    def record_calls(self) -> Record | None:
        return RecordedCalls(self._run_calls)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self._is_linear(x, weight):
            return row_invariant_linear(x, weight, bias)
        key = (weight.shape, weight.is_mkldnn, torch.get_num_threads())
        if key not in self._sum_blocks:
            with not_recorded():
                self._sum_blocks[key] = self._find_sum_block(weight)
        sum_block = self._sum_blocks[key]
        if sum_block is None:
            return row_invariant_linear(x, weight, bias)
        return self._linear(x, weight, bias, sum_block)

    def _is_linear(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the native product can be asked for."""
        return (
            0 < x.shape[0] <= _MAX_LINEAR_ROWS
            and weight.dtype is torch.bfloat16
            and self.isa == "avx512_bf16"
            and weight.shape[0] >= _MIN_LINEAR_COLUMNS
            and weight.shape[1] % 2 == 0
            and (weight.is_mkldnn or weight.is_contiguous())
        )

    def _find_sum_block(self, weight: torch.Tensor) -> int | None:
        """The block with which the native product has the bits of oneDNN's; None: none has.

        The bias takes the leading bits of a sum away, so that the others decide.
        """
        rows, columns = weight.shape
        if weight.is_mkldnn and not _is_blocked(weight):
            return None
        generator = torch.Generator().manual_seed(0)
        blocks: tuple[int, ...] = _SUM_BLOCKS
        for _ in range(0, _CHECKED_SUMS, rows):
            x = torch.randn(1, columns, generator=generator).to(weight.dtype).expand(4, -1)
            bias = -row_invariant_linear(x, weight, None)[0]
            sums = row_invariant_linear(x, weight, bias)
            if sums.count_nonzero() * 2 < sums.numel():
                return None  # sums without rounding say nothing
            blocks = tuple(b for b in blocks if torch.equal(self._linear(x, weight, bias, b), sums))
        return blocks[0] if blocks else None

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sum_block: int
    ) -> torch.Tensor:
        x = x.contiguous()
        assert x.dtype is weight.dtype and x.shape[1] == weight.shape[1]
        assert bias is None or (bias.dtype is x.dtype and bias.is_contiguous())
        out = x.new_empty((x.shape[0], weight.shape[0]))
        is_blocked = weight.is_mkldnn
        data = torch.ops.mkldnn.data_ptr(weight) if is_blocked else weight.data_ptr()
        args = _LINEAR.pack(
            *(_DTYPES[x.dtype], torch.get_num_threads(), x.data_ptr(), *x.shape),
            *(data, weight.shape[0], is_blocked, sum_block),
            *(0 if bias is None else bias.data_ptr(), out.data_ptr()),
        )
        self._call(_Operation.LINEAR, args)
        return out

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor | None:
        return pack_weight(weight)

    def pack_table(self, table: torch.Tensor) -> torch.Tensor | None:
        if table.dtype is not torch.bfloat16 or self.isa != "avx512_bf16" or table.shape[1] % 2:
            return None
        packed = pack_weight(table)
        if packed is None or not _is_blocked(packed):
            return None
        some = torch.linspace(0, len(table) - 1, _CHECKED_TABLE_ROWS).long()
        return packed if torch.equal(self.embedding(some, packed), table[some]) else None

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        if not table.is_mkldnn:
            return functional.embedding(token_ids, table)
        token_ids = token_ids.contiguous()
        assert token_ids.dtype is torch.int64 and token_ids.dim() == 1
        out = token_ids.new_empty((len(token_ids), table.shape[1]), dtype=table.dtype)
        args = _EMBEDDING.pack(
            *(_DTYPES[table.dtype], torch.get_num_threads(), token_ids.data_ptr(), out.shape[0]),
            *(torch.ops.mkldnn.data_ptr(table), *table.shape, out.data_ptr()),
        )
        self._call(_Operation.EMBEDDING, args)
        return out

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.dtype not in _DTYPES or logits.stride(1) != 1:  # of other packages' models
            return logits.argmax(dim=-1)
        rows, size = logits.shape
        out = logits.new_empty(rows, dtype=torch.int64)
        args = _MOST_LIKELY.pack(
            *(_DTYPES[logits.dtype], torch.get_num_threads(), logits.data_ptr()),
            *(rows, size, logits.stride(0), out.data_ptr()),
        )
        self._call(_Operation.MOST_LIKELY, args)
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        assert weight is None or (weight.dtype is x.dtype and weight.is_contiguous())
        out = x.new_empty(x.shape)
        args = _RMS_NORM.pack(
            *(_DTYPES[x.dtype], torch.get_num_threads(), x.data_ptr(), *_strides3(x)),
            *(0 if weight is None else weight.data_ptr(), 0, 0, 0, 0, 0),
            *(out.data_ptr(), eps, offset),
        )
        self._call(_Operation.RMS_NORM, args)
        return out

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
    ) -> torch.Tensor:
        assert x.dim() == 2 and residual.shape == x.shape and _is_row_dense(residual)
        assert residual.dtype is x.dtype and weight.dtype is x.dtype and weight.is_contiguous()
        out = x.new_empty(x.shape)
        args = _RMS_NORM.pack(
            *(_DTYPES[x.dtype], torch.get_num_threads(), x.data_ptr(), *_strides3(x)),
            *(weight.data_ptr(), residual.data_ptr(), residual.stride(0), 0, 0, 0),
            *(out.data_ptr(), eps, offset),
        )
        self._call(_Operation.RMS_NORM, args)
        return out

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        assert gate.shape == x.shape and gate.dtype is x.dtype
        assert weight.dtype is x.dtype and weight.is_contiguous()
        out = x.new_empty(x.shape)
        gate_strides = _strides3(gate)[3:]
        args = _RMS_NORM.pack(
            *(_DTYPES[x.dtype], torch.get_num_threads(), x.data_ptr(), *_strides3(x)),
            *(weight.data_ptr(), 0, 0, gate.data_ptr(), *gate_strides),
            *(out.data_ptr(), eps, 0.0),
        )
        self._call(_Operation.RMS_NORM, args)
        return out

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dim() == 2 and _is_row_dense(x)
        rows, n = x.shape[0], x.shape[1] // 2
        out = x.new_empty((rows, n))
        args = _SILU_AND_MUL.pack(
            *(_DTYPES[x.dtype], torch.get_num_threads(), x.data_ptr(), rows, n, x.stride(0)),
            out.data_ptr(),
        )
        self._call(_Operation.SILU_AND_MUL, args)
        return out

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        assert gate.shape == x.shape and gate.dtype is x.dtype
        out = x.new_empty(x.shape)
        args = _SIGMOID_GATE.pack(
            *(_DTYPES[x.dtype], torch.get_num_threads(), x.data_ptr(), *_strides3(x)),
            *(gate.data_ptr(), *_strides3(gate)[3:], out.data_ptr()),
        )
        self._call(_Operation.SIGMOID_GATE, args)
        return out

    def rotary_embedding(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        cos_sin: torch.Tensor,
        interleaved: bool,
    ) -> None:
        assert positions.dtype is torch.int64 and positions.is_contiguous()
        assert cos_sin.dtype is torch.float32 and _is_row_dense(cos_sin)
        assert key.dtype is query.dtype and _is_row_dense(query) and _is_row_dense(key)
        tokens, query_heads, head_size = query.shape
        assert key.shape[0] == tokens and cos_sin.shape[1] <= head_size
        args = _ROTARY.pack(
            *(_DTYPES[query.dtype], torch.get_num_threads(), positions.data_ptr(), tokens),
            *(query.data_ptr(), query_heads, query.stride(0), query.stride(1)),
            *(key.data_ptr(), key.shape[1], key.stride(0), key.stride(1)),
            *(cos_sin.data_ptr(), cos_sin.stride(0), *cos_sin.shape, interleaved),
        )
        self._call(_Operation.ROTARY_EMBEDDING, args)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        assert slots.dtype is torch.int64 and slots.is_contiguous()
        assert key.shape == value.shape and key.dtype is value.dtype is kv_cache.dtype
        assert _is_row_dense(key) and _is_row_dense(value)
        assert key.shape[1] == kv_cache.shape[3] and slots.shape[0] == key.shape[0]
        args = _WRITE_KV.pack(
            *(_DTYPES[key.dtype], torch.get_num_threads()),
            *(key.data_ptr(), key.stride(0), key.stride(1)),
            *(value.data_ptr(), value.stride(0), value.stride(1)),
            *(slots.data_ptr(), slots.shape[0], *_paged_cache(kv_cache, key.shape[2])),
        )
        self._call(_Operation.WRITE_KV, args)

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        layout: SequenceLayout,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens, heads, head_size = query.shape
        assert query.dtype is kv_cache.dtype and _is_row_dense(query) and scale > 0
        assert block_table.dtype is torch.int32 and _is_row_dense(block_table)
        assert heads % kv_cache.shape[3] == 0
        sink_args = (0, 0)
        if sinks is not None:
            assert sinks.shape == (heads,) and sinks.is_contiguous()
            sinks = sinks if sinks.dtype in _DTYPES else sinks.float()
            sink_args = (sinks.data_ptr(), _DTYPES[sinks.dtype])
        out = query.new_empty((tokens, heads, head_size))
        args = _ATTENTION.pack(
            *(_DTYPES[query.dtype], torch.get_num_threads()),
            *(query.data_ptr(), query.stride(0), query.stride(1), heads),
            *_paged_cache(kv_cache, head_size),
            *(block_table.data_ptr(), block_table.stride(0), block_table.shape[1]),
            *_sequence_pointers(layout),
            *(sliding_window or 0, *sink_args, out.data_ptr(), scale, soft_cap or 0.0),
        )
        self._call(_Operation.PAGED_ATTENTION, args)
        return out

    def copy_blocks(
        self, pool: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor
    ) -> None:
        copy_blocks(pool, sources, destinations)

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state_cache: torch.Tensor,
        layout: SequenceLayout,
        states: StatePlan,
    ) -> torch.Tensor:
        tokens, channels = x.shape
        assert _is_row_dense(x) and weight.is_contiguous() and weight.dtype is x.dtype
        assert state_cache.dtype is x.dtype and _is_row_dense(state_cache)
        assert weight.shape[0] == channels == state_cache.shape[2]
        assert weight.shape[1] == state_cache.shape[1] + 1
        assert bias is None or (bias.dtype is x.dtype and bias.is_contiguous())
        out = _rows_apart(x, tokens, channels)
        args = _CONV.pack(
            *(_DTYPES[x.dtype], torch.get_num_threads()),
            *(x.data_ptr(), x.stride(0), channels, weight.shape[1], weight.data_ptr()),
            *(0 if bias is None else bias.data_ptr(), state_cache.data_ptr()),
            *(state_cache.shape[0], state_cache.stride(0), state_cache.stride(1)),
            *(*_state_plan(layout, states), out.data_ptr(), out.stride(0)),
        )
        self._call(_Operation.CAUSAL_CONV1D, args)
        return out

    def gated_delta_rule(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        state_cache: torch.Tensor,
        num_k_heads: int,
        layout: SequenceLayout,
        states: StatePlan,
        pending: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        tokens = qkv.shape[0]
        blocks, num_v_heads, dk, dv = state_cache.shape
        assert qkv.shape[1] == 2 * num_k_heads * dk + num_v_heads * dv and _is_row_dense(qkv)
        assert a.dtype is qkv.dtype and b.dtype is qkv.dtype and _is_row_dense(a)
        assert _is_row_dense(b) and a.shape == b.shape == (tokens, num_v_heads)
        assert state_cache.dtype is torch.float32 and _is_row_dense(state_cache)
        assert num_v_heads % num_k_heads == 0
        assert a_log.is_contiguous() and dt_bias.is_contiguous()
        out = qkv.new_empty((tokens, num_v_heads, dv))
        wanted = self.delta_rule_pending(qkv.dtype, num_k_heads, num_v_heads, dk, dv)
        for view, (shape, dtype) in zip(pending, wanted, strict=True):
            assert view.shape == (blocks, *shape) and view.dtype is dtype
            assert view[0].is_contiguous()
        parts = [value for view in pending for value in (view.data_ptr(), view.stride(0))]
        parts = parts or [0] * 6  # nothing is pending
        args = _DELTA_RULE.pack(
            *(_DTYPES[qkv.dtype], torch.get_num_threads()),
            *(qkv.data_ptr(), tokens, qkv.stride(0), num_k_heads, num_v_heads, dk, dv),
            *(a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0)),
            *(a_log.data_ptr(), _DTYPES[a_log.dtype], dt_bias.data_ptr(), _DTYPES[dt_bias.dtype]),
            *(state_cache.data_ptr(), blocks, *state_cache.stride()[:3]),
            *(*parts, layout.seq_lens.data_ptr(), *_state_plan(layout, states), out.data_ptr()),
        )
        self._call(_Operation.GATED_DELTA_RULE, args)
        return out

    def delta_rule_pending(
        self, dtype: torch.dtype, num_k_heads: int, num_v_heads: int, dk: int, dv: int
    ) -> tuple[StateTensor, ...]:
        if dtype is torch.float32:
            return ()
        chunk = _DELTA_CHUNK_TOKENS
        return (
            StateTensor((num_k_heads, chunk, dk), dtype),
            StateTensor((num_v_heads, chunk, dv), torch.float32),
            StateTensor((num_v_heads, chunk), torch.float32),
        )

    def capture_rows(
        self,
        row_cache: torch.Tensor,
        slots: torch.Tensor,
        column: int,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        assert slots.dtype is torch.int64 and slots.is_contiguous() and _is_row_dense(hidden)
        assert hidden.dtype is row_cache.dtype and hidden.shape[1] == row_cache.shape[3]
        assert slots.shape[0] == hidden.shape[0]
        second = (0, 0)
        if residual is not None:
            assert residual.shape == hidden.shape and residual.dtype is hidden.dtype
            assert _is_row_dense(residual)
            second = (residual.data_ptr(), residual.stride(0))
        args = _CAPTURE_ROWS.pack(
            *(_DTYPES[hidden.dtype], torch.get_num_threads(), *_row_cache(row_cache)),
            *(slots.data_ptr(), slots.shape[0], column),
            *(hidden.data_ptr(), hidden.stride(0), *second),
        )
        self._call(_Operation.CAPTURE_ROWS, args)

    def gather_rows(
        self, row_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> RowReport:
        assert slots.dtype is torch.int64 and slots.is_contiguous() and out.is_contiguous()
        layers = row_cache.shape[2]
        assert out.dtype is row_cache.dtype
        assert out.shape == (slots.shape[0], layers, row_cache.shape[3])
        if active_recorder() is not None:
            raise NotRecordableError("gather_rows reports what it found")
        report = (ctypes.c_int64 * 2)(-1, -1)
        args = _GATHER_ROWS.pack(
            *(_DTYPES[out.dtype], torch.get_num_threads(), *_row_cache(row_cache)),
            *(slots.data_ptr(), slots.shape[0], out.data_ptr(), ctypes.addressof(report)),
        )
        self._call(_Operation.GATHER_ROWS, args)
        nonfinite, zero = report
        return RowReport(*_row_and_column(nonfinite, layers), *_row_and_column(zero, layers))

    def beside(self, rows: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def inspect_rows(self, rows: torch.Tensor) -> RowReport:
        return inspect_rows(rows)

    def leaving_rows_bytes(self, token_bytes: int) -> int:
        return 0

    def attention_scratch_bytes(self, max_seq_len: int) -> int:
        return 0


def _check(operation: int, status: int) -> None:
    if status:
        name = _Operation(operation).name.lower()
        raise RuntimeError(f"CPU kernel {name}: {_STATUS[status]}")


def _row_and_column(index: int, layers: int) -> tuple[int, int]:
    return divmod(index, layers) if index >= 0 else (-1, -1)


def _is_blocked(packed: torch.Tensor) -> bool:
    """Whether a bfloat16 weight has the size of the order that ``LinearArgs`` describes."""
    operations = torch.ops.mkldnn
    if not hasattr(operations, "data_ptr") or not hasattr(operations, "_nbytes"):
        return False  # an older torch
    rows, columns = packed.shape
    num_bytes: int = operations._nbytes(packed)
    return num_bytes == -(-rows // 64) * 64 * -(-columns // 32) * 32 * 2


def _paged_cache(kv_cache: torch.Tensor, head_size: int) -> tuple[int, ...]:
    """``PagedCache`` of abi.h."""
    blocks, pages, page_tokens, kv_heads, content = kv_cache.shape
    assert content == 2 * head_size and _is_row_dense(kv_cache)
    return (
        *(kv_cache.data_ptr(), blocks, pages, page_tokens, kv_heads, head_size),
        *kv_cache.stride()[:4],
    )


def _row_cache(row_cache: torch.Tensor) -> tuple[int, ...]:
    """``RowCache`` of abi.h."""
    assert row_cache.dim() == 4 and _is_row_dense(row_cache)
    return (row_cache.data_ptr(), *row_cache.shape, *row_cache.stride()[:3])


def _sequence_pointers(layout: SequenceLayout) -> tuple[int, int, int]:
    """Query starts, sequence lengths, number of requests."""
    query_start, seq_lens = layout.query_start, layout.seq_lens
    assert query_start.dtype is torch.int32 and seq_lens.dtype is torch.int32
    assert query_start.is_contiguous() and seq_lens.is_contiguous()
    return query_start.data_ptr(), seq_lens.data_ptr(), seq_lens.shape[0]


def _state_plan(layout: SequenceLayout, states: StatePlan) -> tuple[int, ...]:
    """``StatePlanArgs`` of abi.h."""
    query_start = layout.query_start
    indices = (states.snapshot_start, states.snapshot_tokens, states.snapshot_blocks)
    assert states.has_state.dtype is torch.bool and states.has_state.is_contiguous()
    assert all(
        t.dtype is torch.int32 and t.is_contiguous()
        for t in (query_start, states.block_ids, *indices)
    )
    return (
        *(query_start.data_ptr(), states.block_ids.shape[0], states.block_ids.data_ptr()),
        *(states.has_state.data_ptr(), *(t.data_ptr() for t in indices)),
        0 if states.is_final is None else states.is_final.data_ptr(),
    )
