"""Recurrent states: tensors of fixed size, one set per layer and request.

block | state of L0 | state of L1 | ... as many as fit, large ones and small ones
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.utils import cdiv
from vllm.v1.attention.backend import RecurrentMetadata
from vllm.v1.cache_kinds.base import (
    GroupPlan,
    KVCacheDataReference,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    LayerSet,
    StepInputs,
    view_in_blocks,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STATE_ALIGNMENT_BYTES = 64
"""States that share a block start at multiples of this (one cache line)."""
_LOW, _HIGH, _HALF = 0xFFFF, -0x10000, 0x8000
MIN_FILLED = 0.75
"""Larger blocks are not tried if states that are all alike fill this share of a block."""


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """The recurrent state of one layer: tensors of fixed size, for any length.

    ``block_size`` is the number of tokens between two kept states (the snapshot
    interval); a running request holds one state per layer.
    """

    is_recurrent: ClassVar[bool] = True

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mamba_type: str = "gdn_attention"
    num_speculative_blocks: int = 0
    num_pending: int = 0
    """Number of tensors, the last ones, for tokens that the state does not contain yet. If there
    are any, the tensor before them is stored in halves (:func:`join_halves`)."""

    @classmethod
    def of_tensors(
        cls,
        block_size: int,
        states: Sequence[tuple[tuple[int, ...], torch.dtype]],
        pending: Sequence[tuple[tuple[int, ...], torch.dtype]],
        mamba_type: str = "gdn_attention",
    ) -> MambaSpec:
        """Make a spec from ``(shape, dtype)`` of the state's and of the pending tokens' tensors."""
        shapes, dtypes = zip(*states, *pending, strict=True)
        return cls(
            block_size=block_size,
            shapes=shapes,
            dtypes=dtypes,
            mamba_type=mamba_type,
            num_pending=len(pending),
        )

    @property
    def state_tensors(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """``(shape, dtype)`` of a state in the checkpoint's terms, tensor by tensor.

        docs/pool.md ("Layout") lists the tensors of each kind of layer. A gated delta net has
        the inputs of the convolution [width - 1, channels] in the model's dtype, and the state
        [heads, dk, dv] in float32.
        """
        return tuple(zip(self.shapes, self.dtypes, strict=True))[: self._num_states]

    def read_state(self, views: Sequence[torch.Tensor], block: int) -> list[torch.Tensor]:
        """Copy the state in a block to the host, in the form of :attr:`state_tensors`.

        ``views``: the layer's views, as connectors get them. The copies are the whole state at a
        multiple of the kernels' chunk, where states are kept (``SchedulerOutput.state_snapshots``).
        At any other token some tokens are pending, which only these kernels can take in.
        """
        states = [view[block].cpu() for view in views[: self._num_states]]
        if self.num_pending:
            states[-1] = join_halves(states[-1])
        return [state.clone(memory_format=torch.contiguous_format) for state in states]

    def write_state(
        self, views: Sequence[torch.Tensor], block: int, states: Sequence[torch.Tensor]
    ) -> None:
        """Reverse :meth:`read_state`: the kernels of this machine can continue from the state.

        ValueError: tensors of other shapes or dtypes.
        """
        found = tuple((tuple(state.shape), state.dtype) for state in states)
        if found != self.state_tensors:
            raise ValueError(f"a state of {found} for a layer with {self.state_tensors}")
        for index, (view, state) in enumerate(zip(views, states)):
            in_halves = self.num_pending > 0 and index == self._num_states - 1
            view[block].copy_(part_halves(state) if in_halves else state)

    @property
    def _num_states(self) -> int:
        return len(self.shapes) - self.num_pending

    @property
    def kind(self) -> str:
        return "recurrent state"

    @property
    def state_runs(self) -> tuple[tuple[int, int], ...]:
        """``(offset, bytes)`` of each tensor inside a page, at multiples of its elements."""
        runs, end = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            start = cdiv(end, dtype.itemsize) * dtype.itemsize
            end = start + math.prod(shape) * dtype.itemsize
            runs.append((start, end - start))
        return tuple(runs)

    @property
    def real_page_size_bytes(self) -> int:
        start, length = self.state_runs[-1]
        return start + length

    @property
    def group_key(self) -> Hashable:
        return type(self), self.block_size, self.num_speculative_blocks

    def layer_set(self, layers: Mapping[str, MambaSpec]) -> RecurrentLayers:
        return RecurrentLayers(layers)

    def num_blocks(self, num_tokens: int) -> int:
        return 1

    def max_blocks_per_request(self, vllm_config: VllmConfig) -> int:
        return 1 + self.num_speculative_blocks

    def page_runs(self, tensor: KVCacheTensor, name: str) -> tuple[tuple[int, int], ...]:
        begin = tensor.start_of(name)
        return tuple((begin + start, length) for start, length in self.state_runs)

    def data_references(self, tensor: KVCacheTensor, name: str) -> list[KVCacheDataReference]:
        return [
            KVCacheDataReference(layer=name, tensor_idx=0, runs=(run,), head_stride=None)
            for run in self.page_runs(tensor, name)
        ]

    def layer_views(
        self, pool: torch.Tensor, tensor: KVCacheTensor, name: str
    ) -> tuple[torch.Tensor, ...]:
        """One view [blocks, *shape] for each tensor of the state."""
        return tuple(
            view_in_blocks(pool, dtype, start, tensor.block_stride, shape)
            for (start, _), dtype, shape in zip(
                self.page_runs(tensor, name), self.dtypes, self.shapes, strict=True
            )
        )

    def make_metadata(self, inputs: StepInputs, group_id: int) -> RecurrentMetadata:
        return RecurrentMetadata(inputs.layout, inputs.state_plan(group_id))

    def describe(self, num_layers: int, used_bytes: int) -> str:
        return f"{self.kind}: {num_layers} layers, {used_bytes:,} bytes per request"


class RecurrentLayers(LayerSet):
    """Layers with states of any sizes, packed into as few blocks as a greedy choice needs.

    All states of a request are held, found and released together, so that it does not matter
    which of them share a block.
    """

    order = 1

    def __init__(self, layers: Mapping[str, MambaSpec]) -> None:
        self.layers = dict(layers)
        self.names = list(layers)
        self._sizes = [spec.real_page_size_bytes for spec in layers.values()]
        self.state_bytes = max(self._sizes)
        self.fixed_bytes = sum(self._sizes)

    def accepts(self, block_bytes: int) -> bool:
        """Return whether all states are alike, and fill at least ``MIN_FILLED`` of the block."""
        used = block_bytes // _aligned(self.state_bytes) * self.state_bytes
        return len(set(self._sizes)) == 1 and used >= MIN_FILLED * block_bytes

    def fixed_blocks(self, block_bytes: int) -> float:
        return len(pack_states(self._sizes, block_bytes)) - 1

    def plan(self, block_bytes: int) -> list[GroupPlan]:
        """Plan a group for each block, and in it one tensor per run of layers that are alike."""
        plans = []
        for indices in pack_states(self._sizes, block_bytes):
            names = [self.names[index] for index in indices]
            alike: dict[MambaSpec, list[str]] = {}
            for name in names:
                alike.setdefault(self.layers[name], []).append(name)
            tensors, offset = [], 0
            for spec, own in alike.items():
                stride = _aligned(spec.real_page_size_bytes)
                tensors.append(
                    KVCacheTensor(
                        size=block_bytes,
                        layers=tuple(own),
                        offset=offset,
                        layer_stride=stride if len(own) > 1 else spec.real_page_size_bytes,
                        block_stride=block_bytes,
                    )
                )
                offset += stride * len(own)
            # The largest state represents the group; layers keep their own specs.
            group = KVCacheGroupSpec(layer_names=names, kv_cache_spec=self.layers[names[0]])
            plans.append(GroupPlan(group, tensors))
        return plans


def pack_states(sizes: Sequence[int], block_bytes: int) -> list[list[int]]:
    """Distribute states, the largest first, each to the first block that has room for it.

    Returns the indices of the states in each block. No two blocks could be merged. Equal states
    stay in order, and fill as few blocks as possible.
    """
    blocks: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        found = next((b for b, room in enumerate(rooms) if room >= size), len(blocks))
        if found == len(blocks):
            blocks.append([])
            rooms.append(block_bytes)
        blocks[found].append(index)
        rooms[found] -= _aligned(size)
    return blocks


def _aligned(size: int) -> int:
    return cdiv(size, STATE_ALIGNMENT_BYTES) * STATE_ALIGNMENT_BYTES


def join_halves(stored: torch.Tensor) -> torch.Tensor:
    """Float32 [..., dk, dv] of a state that is stored as rounded halves and the rest of its bits,
    without loss (``csrc/cpu/state_halves.h``)."""
    words = stored.contiguous().view(torch.int32)
    pairs = words.shape[-2] // 2
    rounded, low = words[..., :pairs, :], words[..., pairs : 2 * pairs, :]
    plain = words.clone()
    plain[..., 0 : 2 * pairs : 2, :] = (rounded << 16) + ((low << 16) >> 16)
    plain[..., 1 : 2 * pairs : 2, :] = (rounded & _HIGH) + (low >> 16)
    return plain.view(torch.float32)


def part_halves(plain: torch.Tensor) -> torch.Tensor:
    """Reverse :func:`join_halves`."""
    words = plain.contiguous().view(torch.int32)
    pairs = words.shape[-2] // 2
    upper, lower = words[..., 0 : 2 * pairs : 2, :], words[..., 1 : 2 * pairs : 2, :]
    stored = words.clone()
    stored[..., :pairs, :] = (((upper + _HALF) >> 16) & _LOW) | ((lower + _HALF) & _HIGH)
    stored[..., pairs : 2 * pairs, :] = (upper & _LOW) | (lower << 16)
    return stored.view(torch.float32)
