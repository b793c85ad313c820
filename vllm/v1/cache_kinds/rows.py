"""Captured hidden states: rows of all layers asked for, token after token.

block | row 0 | row 1 | ...  each [layers asked, hidden]
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.utils import cdiv
from vllm.utils.expert_trace import ExpertLayout
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.cache_kinds.base import (
    GroupPlan,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    LayerCache,
    LayerSet,
    RetentionLimits,
    StepInputs,
    view_in_blocks,
)
from vllm.v1.core.single_type_kv_cache_manager import HiddenStateManager, TokenBlockManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool


@dataclass(frozen=True, kw_only=True)
class HiddenStateCacheSpec(KVCacheSpec):
    """Rows of captured hidden states: ``[token, layer asked, hidden]``, no keys, no values."""

    holds_rows: ClassVar[bool] = True

    num_kv_heads: int
    """Number of extracted layers."""
    head_size: int
    """Elements of one row and layer on this rank (hidden size, or its tensor-parallel slice)."""
    dtype: torch.dtype
    max_resident_tokens: int | None = None
    """Most tokens whose rows one request holds at once; None: all of them."""
    experts: ExpertLayout | None = None
    """What is kept of each token behind its row, in memory of whole columns."""

    @property
    def _num_columns(self) -> int:
        """Layers of a row, and columns that hold its trace."""
        layout = self.experts
        trace = 0 if layout is None else layout.num_columns(self.head_size, self.dtype)
        return self.num_kv_heads + trace

    @property
    def kind(self) -> str:
        return "hidden states"

    @property
    def token_bytes(self) -> int:
        """Bytes of the rows of one token."""
        return self._num_columns * self.head_size * self.dtype.itemsize

    @property
    def real_page_size_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def max_blocks_per_request(self, vllm_config: VllmConfig) -> int:
        whole = super().max_blocks_per_request(vllm_config)
        if self.max_resident_tokens is None:
            return whole
        return min(whole, cdiv(self.max_resident_tokens, self.block_size) + 1)

    @property
    def group_key(self) -> Hashable:
        return self

    def layer_set(self, layers: Mapping[str, HiddenStateCacheSpec]) -> RowLayers:
        return RowLayers(list(layers), self)

    def _rows_per_block(self, tensor: KVCacheTensor) -> int:
        return tensor.block_stride // self.token_bytes

    def page_runs(self, tensor: KVCacheTensor, name: str) -> tuple[tuple[int, int], ...]:
        return ((tensor.start_of(name), self._rows_per_block(tensor) * self.token_bytes),)

    def layer_views(self, pool: torch.Tensor, tensor: KVCacheTensor, name: str) -> torch.Tensor:
        """[blocks, rows, layers, hidden]; ``experts`` finds the traces behind them."""
        shape = (self._rows_per_block(tensor), self._num_columns, self.head_size)
        rows = view_in_blocks(pool, self.dtype, tensor.offset, tensor.block_stride, shape)
        return rows[:, :, : self.num_kv_heads]

    def published_view(self, view: LayerCache) -> LayerCache:
        """[blocks, layers, rows, hidden], as connectors know it."""
        assert isinstance(view, torch.Tensor)
        return view.transpose(1, 2)

    def make_manager(
        self, pool: BlockPool, group_id: int, limits: RetentionLimits
    ) -> TokenBlockManager:
        if self.max_resident_tokens is None:
            return super().make_manager(pool, group_id, limits)
        return HiddenStateManager(pool, group_id, self.block_size, limits.max_hidden_blocks)

    def make_metadata(self, inputs: StepInputs, group_id: int) -> AttentionMetadata:
        table, slots = inputs.block_table(group_id), inputs.slots(group_id)
        return AttentionMetadata(inputs.layout, table, slots)

    def describe(self, num_layers: int, used_bytes: int) -> str:
        return f"{self.kind}: {self.block_size} rows a block, {self.token_bytes:,} bytes a token"


class RowLayers(LayerSet):
    """A group of its own for each layer: its rows fill the block."""

    order = 2

    def __init__(self, names: list[str], spec: HiddenStateCacheSpec) -> None:
        self.names = names
        self.spec = spec
        self.row_bytes = spec.token_bytes

    def plan(self, block_bytes: int) -> list[GroupPlan]:
        rows = block_bytes // self.row_bytes
        spec = replace(self.spec, block_size=rows, page_size_padded=block_bytes)
        return [
            GroupPlan(
                KVCacheGroupSpec(layer_names=[name], kv_cache_spec=spec),
                [
                    KVCacheTensor(
                        size=block_bytes, layers=(name,), layer_stride=0, block_stride=block_bytes
                    )
                ],
            )
            for name in self.names
        ]
