"""Recorded decode steps: one launch for all kernels of a forward pass.

A CUDA graph reads and writes fixed addresses, so a step's inputs are copied into buffers. These
are filled up to the next of a few batch sizes with dummy requests of one token, which read and
write the null block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import repeat
from operator import contains
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from vllm.forward_context import ForwardContext
from vllm.ops.layout import SequenceLayout, StatePlan
from vllm.utils.transfers import pinned_for
from vllm.v1.cache_kinds.base import KVCacheConfig
from vllm.v1.worker.input_batch import StepBatch, layer_metadata

if TYPE_CHECKING:
    import numpy.typing as npt

    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)

Forward = Callable[[torch.Tensor, torch.Tensor, ForwardContext], torch.Tensor]
"""Token ids, positions, context -> the stream after the final norm."""
Replay = Callable[[], None]
Record = Callable[[Callable[[], torch.Tensor]], tuple[Replay, torch.Tensor]]
"""Calls a function; returns a function that repeats it, and the tensor that then holds its result
until another recording is repeated."""


def record_cuda_graph() -> Record:
    """Make recordings on CUDA; they share one pool of memory, since no two run at once."""
    pool: list[Any] = []
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(run: Callable[[], torch.Tensor]) -> tuple[Replay, torch.Tensor]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # kernels are compiled and libraries loaded before anything is recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # CUDA calls of other threads meanwhile do not concern this recording.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=pool[0] if pool else None, capture_error_mode=mode):
            result = run()
        pool.append(graph.pool())
        return graph.replay, result

    return record


class _ByGroup(dict[int, torch.Tensor]):
    """Buffers by group, each made when it is first asked for."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, group_id: int) -> torch.Tensor:
        buffer = self[group_id] = self._make(group_id)
        return buffer


class _Buffers:
    """Inputs of the largest batch, at fixed addresses; smaller ones use the first entries."""

    def __init__(
        self, config: KVCacheConfig, max_batch: int, model: ModelConfig, device: torch.device
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len = model.max_model_len
        zeros = partial(torch.zeros, dtype=torch.int32, device=device)
        numbers = partial(torch.zeros, max_batch, dtype=torch.int64, device=device)
        self.token_ids, self.positions = numbers(), numbers()
        self.rotary_positions = None if model.longrope_limit is None else numbers()
        self.query_start = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self.seq_lens = zeros(max_batch) + 1
        self.has_state = zeros(max_batch).bool()
        self.no_snapshots = zeros(max_batch + 1)
        self.nothing = zeros(0)
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        self.block_sizes = [spec.block_size for spec in specs]
        self.state_blocks = _ByGroup(lambda _: zeros(max_batch))
        self.tables = _ByGroup(lambda gid: zeros(max_batch, specs[gid].num_blocks(max_model_len)))
        self.slots = _ByGroup(lambda _: numbers() - 1)


class _RecordedInputs:
    """The :class:`vllm.v1.cache_kinds.base.StepInputs` of a batch of one size, in the buffers."""

    def __init__(self, buffers: _Buffers, size: int) -> None:
        self._buffers = buffers
        self._size = size
        self.layout = SequenceLayout(
            query_start=buffers.query_start[: size + 1],
            seq_lens=buffers.seq_lens[:size],
            max_query_len=1,
            max_seq_len=buffers.max_model_len,
            is_recorded=True,
        )

    def block_table(self, group_id: int) -> torch.Tensor:
        return self._buffers.tables[group_id][: self._size]

    def slots(self, group_id: int) -> torch.Tensor:
        return self._buffers.slots[group_id][: self._size]

    def state_plan(self, group_id: int) -> StatePlan:
        buffers, size = self._buffers, self._size
        return StatePlan(
            buffers.state_blocks[group_id][:size],
            buffers.has_state[:size],
            buffers.no_snapshots[: size + 1],
            buffers.nothing,
            buffers.nothing,
        )


class Recording(NamedTuple):
    """A forward pass that can be repeated, for one batch size."""

    context: ForwardContext
    """The metadata of its layers, for connectors."""
    replay: Replay
    hidden: torch.Tensor
    """[batch size, hidden], valid until the next recording is replayed."""


class Onlookers:
    """Detects third-party code that runs with a model's modules: a recording would leave it out.

    with_hooks: modules that have one hook of each kind of ours.
    """

    def __init__(self, model: nn.Module, with_hooks: Collection[nn.Module] = ()) -> None:
        modules = list(model.modules())
        known = set(with_hooks)
        self._attributes = [vars(module) for module in modules]
        self._hooks = _hooks_of(module for module in modules if module not in known)
        self._hooks += [getattr(nn.modules.module, name, {}) for name in _GLOBAL_HOOKS]
        self._with_one = _hooks_of(known)

    def are_there(self) -> bool:
        """Return whether there are hooks, or a ``forward`` that was put into a module."""
        if any(self._hooks) or any(len(hooks) > 1 for hooks in self._with_one):
            return True
        return any(map(contains, self._attributes, repeat("forward")))


def _hooks_of(modules: Iterable[nn.Module]) -> list[Any]:
    return [hooks for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks)]


_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")


def detached(context: ForwardContext) -> ForwardContext:
    """Copy the metadata as they are now, for readers that look at them after the next step."""
    copies = {id(one): _cloned(one) for one in context.attn_metadata.values()}
    metadata = {name: copies[id(one)] for name, one in context.attn_metadata.items()}
    return replace(context, attn_metadata=metadata)


def _cloned(value: Any) -> Any:
    """Copy a value with all of its tensors, including those inside dataclasses."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _cloned(getattr(value, f.name)) for f in fields(value)})
    return value


class RecordedSteps:
    """One recorded forward pass for each of :data:`BATCH_SIZES` up to the first that can hold
    ``max_num_seqs`` requests; all are recorded here, not when a batch needs them."""

    def __init__(
        self,
        config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        device: torch.device,
        forward: Forward,
        proposer: ExtractHiddenStatesProposer | None,
        record: Record,
    ) -> None:
        self._forward = forward
        self._proposer = proposer
        largest = bisect_left(BATCH_SIZES, config.scheduler_config.max_num_seqs)
        self._sizes = BATCH_SIZES[: largest + 1]
        self._buffers = _Buffers(kv_cache_config, self._sizes[-1], config.model_config, device)
        self._recordings = {  # the largest first: the others fit into its memory
            size: Recording(self._context(size, None), *record(partial(self._run, size)))
            for size in reversed(self._sizes)
        }

    def _run(self, size: int) -> torch.Tensor:
        buffers = self._buffers
        context = self._context(size, self._proposer)
        return self._forward(buffers.token_ids[:size], buffers.positions[:size], context)

    def can_run(self, batch: StepBatch) -> bool:
        """Return whether each request has one token, and there are not too many requests."""
        return len(batch.states) == batch.num_tokens <= self._sizes[-1]

    def prepare(
        self, batch: StepBatch, fill_in: Callable[[StepBatch, torch.Tensor], None]
    ) -> Recording:
        """Return the recording for this batch, with its inputs in place.

        ``fill_in`` puts token ids that only the device knows into the tensor it gets.
        """
        size = self._sizes[bisect_left(self._sizes, batch.num_tokens)]
        buffers = self._buffers
        _copy(buffers.token_ids[:size], batch.token_ids, 0)
        fill_in(batch, buffers.token_ids)
        _copy(buffers.positions[:size], batch.positions, 0)
        if buffers.rotary_positions is not None and batch.rotary_positions is not None:
            _copy(buffers.rotary_positions[:size], batch.rotary_positions, 0)
        _copy(buffers.seq_lens[:size], batch.num_computed + 1, 1)
        _copy(buffers.has_state[:size], batch.num_computed > 0, 0)
        groups = list(buffers.state_blocks)
        blocks = batch.first_blocks(groups) if groups else ()
        for gid, own in zip(groups, blocks, strict=True):
            _copy(buffers.state_blocks[gid][:size], own, 0)
        for gid in buffers.tables.keys() | buffers.slots.keys():
            table = batch.block_table(gid)
            if gid in buffers.slots:
                slots = batch.slots(table, buffers.block_sizes[gid])
                _copy(buffers.slots[gid][:size], slots, -1)
            if gid in buffers.tables:
                _copy(buffers.tables[gid][:size, : table.shape[1]], table, 0)
        return self._recordings[size]

    def _context(self, size: int, proposer: ExtractHiddenStatesProposer | None) -> ForwardContext:
        metadata = layer_metadata(self._buffers.config, _RecordedInputs(self._buffers, size))
        sink = (
            None
            if proposer is None
            else proposer.begin_step(metadata[proposer.layer_name].slot_mapping)
        )
        rotary = self._buffers.rotary_positions
        return ForwardContext(
            metadata, sink, rotary_positions=None if rotary is None else rotary[:size]
        )


def _copy(static: torch.Tensor, values: npt.NDArray[np.generic], padding: int) -> None:
    """Copy the values into the first entries, and the padding into those that are left."""
    padded = np.empty(static.shape, values.dtype) if static.is_cuda else static.numpy()
    if padded.shape != values.shape:
        padded.fill(padding)
    padded[tuple(map(slice, values.shape))] = values
    if static.is_cuda:
        tensor = torch.from_numpy(padded).to(static.dtype)
        static.copy_(pinned_for(static.device, tensor), non_blocking=True)
