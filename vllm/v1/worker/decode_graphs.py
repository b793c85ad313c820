"""Decode steps as recorded CUDA graphs: one launch for all kernels of a forward pass.

A graph reads and writes fixed addresses, so a step's inputs are copied into buffers, filled
up to the next of a few batch sizes with requests of one token that belong to nobody: they
read and write the null block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm.forward_context import ForwardContext, RowSink
from vllm.kernels.base import SequenceLayout, StatePlan
from vllm.utils.transfers import pinned_for
from vllm.v1.attention.backend import AttentionMetadata, RecurrentMetadata
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheConfig, MambaSpec, cdiv
from vllm.v1.worker.input_batch import StepBatch

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

Forward = Callable[[torch.Tensor, torch.Tensor, ForwardContext], torch.Tensor]
"""``forward(token_ids, positions, context)``: normed hidden states [tokens, hidden]."""

Replay = Callable[[], None]
Record = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]
"""Runs a function once and returns what repeats it, and the tensor its result stands in."""

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
        with torch.cuda.graph(graph, pool=pool[0] if pool else None):
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
        self.state_blocks: dict[int, torch.Tensor] = {}
        self.tables: dict[int, torch.Tensor] = {}
        self.slots: dict[int, torch.Tensor] = {}
        for gid, group in enumerate(config.kv_cache_groups):
            spec = group.kv_cache_spec
            if isinstance(spec, MambaSpec):
                self.state_blocks[gid] = integers(max_batch)
            else:
                self.tables[gid] = integers(max_batch, cdiv(max_model_len, spec.block_size))
                self.slots[gid] = integers(max_batch, dtype=torch.int64) - 1


class Recording(NamedTuple):
    """A forward pass that can be repeated, for one batch size."""

    context: ForwardContext
    """The metadata of its layers, for connectors."""
    replay: Replay
    hidden: torch.Tensor
    """[batch size, hidden], until the next recording is replayed."""


class DecodeGraphs:
    """One recorded forward pass for each batch size.

    ``max_batch``: most requests of a step. ``begin_rows``: of an engine that extracts.
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
        self._max_model_len = max_model_len
        largest = bisect_left(BATCH_SIZES, max_batch)
        self._sizes = BATCH_SIZES[: largest + 1]
        self._buffers = _Buffers(config, self._sizes[-1], max_model_len, device)
        self._recordings: dict[int, Recording] = {}
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            context = self._context(size, None)
            run = partial(self._run, size, forward, begin_rows)
            self._recordings[size] = Recording(context, *record(run))

    def _run(self, size: int, forward: Forward, begin_rows: BeginRows | None) -> torch.Tensor:
        buffers = self._buffers
        context = self._context(size, begin_rows)
        return forward(buffers.token_ids[:size], buffers.positions[:size], context)

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
        buffers = self._buffers
        num_padding = size - batch.num_tokens
        _copy(buffers.token_ids, batch.token_ids, num_padding, 0)
        fill_in(batch, buffers.token_ids)
        _copy(buffers.positions, batch.positions, num_padding, 0)
        _copy(buffers.seq_lens, batch.num_computed + 1, num_padding, 1)
        _copy(buffers.has_state, batch.num_computed > 0, num_padding, 0)
        for gid, blocks in buffers.state_blocks.items():
            firsts = np.array([state.block_tables[gid].values[0] for state in batch.states])
            _copy(blocks, firsts, num_padding, 0)
        for gid, static in buffers.tables.items():
            table = batch.block_table(gid)
            tokens_per_block = self._config.kv_cache_groups[gid].kv_cache_spec.block_size
            _copy(buffers.slots[gid], batch.slots(table, tokens_per_block), num_padding, -1)
            _copy(static[:, : table.shape[1]], table, num_padding, 0)
        return self._recordings[size]

    def _context(self, size: int, begin_rows: BeginRows | None) -> ForwardContext:
        buffers = self._buffers
        layout = SequenceLayout(
            query_start=buffers.query_start[: size + 1],
            seq_lens=buffers.seq_lens[:size],
            max_query_len=1,
            max_seq_len=self._max_model_len,
        )
        metadata: dict[str, AttentionMetadata | RecurrentMetadata] = {}
        sink = None
        for gid, group in enumerate(self._config.kv_cache_groups):
            one: AttentionMetadata | RecurrentMetadata
            if gid in buffers.state_blocks:
                blocks, has_state = buffers.state_blocks[gid][:size], buffers.has_state[:size]
                snapshots = (buffers.no_snapshots[: size + 1], buffers.nothing, buffers.nothing)
                one = RecurrentMetadata(layout, StatePlan(blocks, has_state, *snapshots))
            else:
                slots = buffers.slots[gid][:size]
                one = AttentionMetadata(layout, buffers.tables[gid][:size], slots)
                if begin_rows and isinstance(group.kv_cache_spec, HiddenStateCacheSpec):
                    sink = begin_rows(slots)
            metadata.update(dict.fromkeys(group.layer_names, one))
        return ForwardContext(metadata, sink)


def _copy(
    static: torch.Tensor, values: npt.NDArray[np.generic], num_padding: int, padding: int
) -> None:
    """The values, then the padding, into the first entries."""
    width: Sequence[tuple[int, int]] = [(0, num_padding)] + [(0, 0)] * (values.ndim - 1)
    padded = torch.from_numpy(np.pad(values, width, constant_values=padding)).to(static.dtype)
    static[: len(padded)].copy_(pinned_for(static.device, padded), non_blocking=True)
