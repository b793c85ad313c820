"""Recurrent states: tensors of fixed size, one set a layer and request.

block | state of L0 | state of L1 | ... as many as fit
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
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


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """The recurrent state of one layer: tensors of fixed size, whatever the length.

    ``block_size`` is the number of tokens between two kept states (the snapshot
    interval); a running request holds one state a layer.
    """

    is_recurrent: ClassVar[bool] = True

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mamba_type: str = "gdn_attention"
    num_speculative_blocks: int = 0

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
        return self

    def layer_set(self, layers: Mapping[str, MambaSpec]) -> RecurrentLayers:
        return RecurrentLayers(list(layers), self)

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
        """One [blocks, *shape] for each tensor of the state."""
        return tuple(
            view_in_blocks(pool, dtype, start, tensor.block_stride, shape)
            for (start, _), dtype, shape in zip(
                self.page_runs(tensor, name), self.dtypes, self.shapes, strict=True
            )
        )

    def make_metadata(self, inputs: StepInputs, group_id: int) -> RecurrentMetadata:
        return RecurrentMetadata(inputs.layout, inputs.state_plan(group_id))

    def describe(self, num_layers: int, used_bytes: int) -> str:
        return f"{self.kind}: {num_layers} layers a block"


class RecurrentLayers(LayerSet):
    """Layers with equal states: as many share a block as fit, evenly spread over groups."""

    order = 1

    def __init__(self, names: list[str], spec: MambaSpec) -> None:
        self.names = names
        self.spec = spec
        self.state_bytes = spec.real_page_size_bytes

    def plan(self, block_bytes: int) -> list[GroupPlan]:
        aligned = cdiv(self.state_bytes, STATE_ALIGNMENT_BYTES) * STATE_ALIGNMENT_BYTES
        per_block = max(1, block_bytes // aligned)
        num_groups = cdiv(len(self.names), per_block)
        per_group = cdiv(len(self.names), num_groups)
        plans = []
        for first in range(0, len(self.names), per_group):
            names = self.names[first : first + per_group]
            tensor = KVCacheTensor(
                size=block_bytes,
                layers=tuple(names),
                layer_stride=aligned if len(names) > 1 else self.state_bytes,
                block_stride=block_bytes,
            )
            group = KVCacheGroupSpec(layer_names=names, kv_cache_spec=self.spec)
            plans.append(GroupPlan(group, [tensor]))
        return plans
