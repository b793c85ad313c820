"""Decode steps as they were recorded: one launch for all kernels of a forward pass.

A CUDA graph reads and writes fixed addresses, so a step's inputs are copied into buffers, filled
up to the next of a few batch sizes with requests of one token that belong to nobody: they read
and write the null block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import repeat
from operator import contains
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vllm.forward_context import ForwardContext, RowSink
from vllm.ops.layout import SequenceLayout, StatePlan
from vllm.utils.transfers import pinned_for
from vllm.v1.attention.backend import AttentionMetadata, RecurrentMetadata
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheConfig, MambaSpec, cdiv
from vllm.v1.worker.input_batch import StepBatch

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

Forward = Callable[[torch.Tensor, torch.Tensor, ForwardContext], torch.Tensor]
"""``forward(token_ids, positions, context)``: normed hidden states [tokens, hidden]."""

Replay = Callable[[], None]
Record = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]
"""Calls a function and returns what repeats it, and the tensor its result stands in then,
until another recording is repeated."""

BeginRows = Callable[[torch.Tensor], RowSink]
"""Makes the sink of a step from the slots of its rows."""


def record_cuda_graph() -> Record:
    """Recordings on CUDA; they share one pool of memory, for no two run at once."""
    pool: list[Any] = []
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(run: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # kernels are compiled and libraries loaded before anything is recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads do on the card meanwhile is not this recording's business.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=pool[0] if pool else None, capture_error_mode=mode):
            result = run()
        pool.append(graph.pool())
        return graph.replay, result

    return record


class _Buffers:
    """Inputs of the largest batch; smaller ones use the first entries."""

    def __init__(
        self, config: KVCacheConfig, max_batch: int, max_model_len: int, device: torch.device
    ) -> None:
        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids = integers(max_batch, dtype=torch.int64)
        self.positions = integers(max_batch, dtype=torch.int64)
        self.query_start = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self.seq_lens = integers(max_batch) + 1
        self.has_state = integers(max_batch, dtype=torch.bool)
        self.no_snapshots = integers(max_batch + 1)
        self.nothing = integers(0)
        recurrent = config.group_ids(MambaSpec)
        self.state_blocks = integers(len(recurrent), max_batch)
        self.state_blocks_of = dict(zip(recurrent, self.state_blocks, strict=True))
        self.tables: dict[int, torch.Tensor] = {}
        self.slots: dict[int, torch.Tensor] = {}
        for gid, group in enumerate(config.kv_cache_groups):
            spec = group.kv_cache_spec
            if not isinstance(spec, MambaSpec):
                self.tables[gid] = integers(max_batch, cdiv(max_model_len, spec.block_size))
                self.slots[gid] = integers(max_batch, dtype=torch.int64) - 1


class Recording(NamedTuple):
    """A forward pass that can be repeated, for one batch size."""

    context: ForwardContext
    """The metadata of its layers, for connectors."""
    replay: Replay
    hidden: torch.Tensor
    """[batch size, hidden], until the next recording is replayed."""


class Onlookers:
    """Whether code of others runs with a model's modules now: a recording would leave it out."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._attributes = [vars(module) for module in modules]
        self._hooks = [hooks for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        self._hooks += [getattr(nn.modules.module, name, {}) for name in _GLOBAL_HOOKS]

    def are_there(self) -> bool:
        """Hooks, or a ``forward`` that was put into a module."""
        return any(self._hooks) or any(map(contains, self._attributes, repeat("forward")))


_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")


def detached(context: ForwardContext) -> ForwardContext:
    """The metadata as they are now, for those who look at them after the next step."""
    copies: dict[int, AttentionMetadata | RecurrentMetadata] = {}
    for one in context.attn_metadata.values():
        if id(one) in copies:
            continue
        layout = _cloned(one.layout, "seq_lens")
        if isinstance(one, AttentionMetadata):
            copy = replace(_cloned(one, "block_table", "slot_mapping"), layout=layout)
        else:
            states = _cloned(one.states, "block_ids", "has_state")
            copy = replace(one, layout=layout, states=states)
        copies[id(one)] = copy
    metadata = {name: copies[id(one)] for name, one in context.attn_metadata.items()}
    return replace(context, attn_metadata=metadata)


def _cloned(record: Any, *names: str) -> Any:
    return replace(record, **{name: getattr(record, name).clone() for name in names})


class RecordedSteps:
    """One recorded forward pass for each batch size.

    There are those of :data:`BATCH_SIZES` up to the first that holds ``max_batch`` requests.
    ``begin_rows``: of an engine that extracts.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        forward: Forward,
        record: Record,
        begin_rows: BeginRows | None,
        *,
        max_batch: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._config = config
        self._forward = forward
        self._record = record
        self._begin_rows = begin_rows
        self._max_model_len = max_model_len
        largest = bisect_left(BATCH_SIZES, max_batch)
        self._sizes = BATCH_SIZES[: largest + 1]
        self._buffers = _Buffers(config, self._sizes[-1], max_model_len, device)
        self._recordings: dict[int, Recording] = {}

    def record_all(self) -> None:
        """Record every size now, not when a batch needs it."""
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            self._recording(size)

    def _recording(self, size: int) -> Recording:
        if size not in self._recordings:
            context = self._context(size, None)
            self._recordings[size] = Recording(context, *self._record(partial(self._run, size)))
        return self._recordings[size]

    def _run(self, size: int) -> torch.Tensor:
        buffers = self._buffers
        context = self._context(size, self._begin_rows)
        return self._forward(buffers.token_ids[:size], buffers.positions[:size], context)

    def can_run(self, batch: StepBatch) -> bool:
        """Whether each request has one token, and there are not too many of them."""
        return len(batch.states) == batch.num_tokens <= self._sizes[-1]

    def prepare(
        self, batch: StepBatch, fill_in: Callable[[StepBatch, torch.Tensor], None]
    ) -> Recording:
        """The recording for this batch, its inputs in place.

        ``fill_in`` puts token ids that only the device knows into the tensor it gets.
        """
        size = self._sizes[bisect_left(self._sizes, batch.num_tokens)]
        recording = self._recording(size)
        buffers = self._buffers
        _copy(buffers.token_ids[:size], batch.token_ids, 0)
        fill_in(batch, buffers.token_ids)
        _copy(buffers.positions[:size], batch.positions, 0)
        _copy(buffers.seq_lens[:size], batch.num_computed + 1, 1)
        _copy(buffers.has_state[:size], batch.num_computed > 0, 0)
        if buffers.state_blocks_of:
            blocks = batch.first_blocks(list(buffers.state_blocks_of))
            _copy(buffers.state_blocks[:, :size], blocks, 0)
        for gid, static in buffers.tables.items():
            table = batch.block_table(gid)
            tokens_per_block = self._config.kv_cache_groups[gid].kv_cache_spec.block_size
            _copy(buffers.slots[gid][:size], batch.slots(table, tokens_per_block), -1)
            _copy(static[:size, : table.shape[1]], table, 0)
        return recording

    def _context(self, size: int, begin_rows: BeginRows | None) -> ForwardContext:
        buffers = self._buffers
        layout = SequenceLayout(
            query_start=buffers.query_start[: size + 1],
            seq_lens=buffers.seq_lens[:size],
            max_query_len=1,
            max_seq_len=self._max_model_len,
            is_recorded=True,
        )
        metadata: dict[str, AttentionMetadata | RecurrentMetadata] = {}
        sink = None
        for gid, group in enumerate(self._config.kv_cache_groups):
            one: AttentionMetadata | RecurrentMetadata
            if gid in buffers.state_blocks_of:
                blocks, has_state = buffers.state_blocks_of[gid][:size], buffers.has_state[:size]
                snapshots = (buffers.no_snapshots[: size + 1], buffers.nothing, buffers.nothing)
                one = RecurrentMetadata(layout, StatePlan(blocks, has_state, *snapshots))
            else:
                slots = buffers.slots[gid][:size]
                one = AttentionMetadata(layout, buffers.tables[gid][:size], slots)
                if begin_rows and isinstance(group.kv_cache_spec, HiddenStateCacheSpec):
                    sink = begin_rows(slots)
            metadata.update(dict.fromkeys(group.layer_names, one))
        return ForwardContext(metadata, sink)


def _copy(static: torch.Tensor, values: npt.NDArray[np.generic], padding: int) -> None:
    """The values into the first entries, the padding into those that are left."""
    padded = np.empty(static.shape, values.dtype) if static.is_cuda else static.numpy()
    if padded.shape != values.shape:
        padded.fill(padding)
    padded[tuple(map(slice, values.shape))] = values
    if static.is_cuda:
        tensor = torch.from_numpy(padded).to(static.dtype)
        static.copy_(pinned_for(static.device, tensor), non_blocking=True)
