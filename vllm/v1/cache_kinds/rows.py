"""Captured hidden states: rows of all layers asked for, token after token.

block | row 0 | row 1 | ...  each [layers asked, hidden], and further fields (RowLayout)

With ``shares_table``, for connectors that know a single block table, rows lie in the blocks of the
attention layers:

block | page of 16 tokens: L0 L1 ... | next 16 tokens: L0 L1 ... | row 0 | row 1 | ...
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.utils import cdiv
from vllm.v1.cache_kinds.attention import FullAttentionSpec
from vllm.v1.cache_kinds.base import (
    PAGE_TOKENS,
    GroupPlan,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    LayerCache,
    LayerSet,
    RetentionLimits,
    tokens_of_a_rank,
    view_in_blocks,
)
from vllm.v1.core.single_type_kv_cache_manager import HiddenStateManager, TokenBlockManager
from vllm.v1.rows.fields.layout import Cells, Field, RowLayout

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
    """The most tokens whose rows one request holds at once; None: all of them."""
    fields: tuple[Field, ...] = ()
    """Fields that are kept of each token after its hidden states."""
    shares_table: bool = False
    """True if rows follow the pages of the same tokens, in the blocks of the attention layers."""

    @cached_property
    def row_layout(self) -> RowLayout:
        """The layout of a row in memory."""
        return RowLayout(Cells(self.dtype, self.num_kv_heads, self.head_size), self.fields)

    @property
    def kind(self) -> str:
        return "hidden states"

    @property
    def token_bytes(self) -> int:
        return self.row_layout.row_bytes

    def max_blocks_per_request(self, vllm_config: VllmConfig) -> int:
        whole = super().max_blocks_per_request(vllm_config)
        if self.max_resident_tokens is None:
            return whole
        return min(whole, cdiv(self.max_resident_tokens, self.block_size) + 1)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """The bytes that connectors know by this name: rows spread like the tokens of a request.

        The pool is planned for :meth:`max_blocks_per_request`: one rank has all rows.
        """
        blocks = cdiv(tokens_of_a_rank(vllm_config), self.block_size)
        return min(blocks, self.max_blocks_per_request(vllm_config)) * self.page_size_bytes

    @property
    def group_key(self) -> Hashable:
        return self

    def layer_set(self, layers: Mapping[str, HiddenStateCacheSpec]) -> RowLayers:
        return RowLayers(list(layers), self)

    def _rows_per_block(self, tensor: KVCacheTensor) -> int:
        if self.shares_table:
            return tensor.pages_per_block * PAGE_TOKENS
        return tensor.block_stride // self.token_bytes

    def page_runs(self, tensor: KVCacheTensor, name: str) -> tuple[tuple[int, int], ...]:
        return ((tensor.start_of(name), self._rows_per_block(tensor) * self.token_bytes),)

    def layer_views(self, pool: torch.Tensor, tensor: KVCacheTensor, name: str) -> torch.Tensor:
        """[blocks, rows, layers, hidden]; ``row_layout`` finds the other fields after them."""
        num_rows, row = self._rows_per_block(tensor), self.row_layout.row_bytes
        whole = view_in_blocks(
            pool, torch.int8, tensor.offset, tensor.block_stride, (num_rows, row)
        )
        hidden = whole[..., : self.row_layout.first.num_bytes].view(self.dtype)
        return hidden.view(*hidden.shape[:2], self.num_kv_heads, self.head_size)

    def published_view(self, view: LayerCache) -> LayerCache:
        """[blocks, layers, rows, hidden], the form that connectors expect."""
        assert isinstance(view, torch.Tensor)
        return view.transpose(1, 2)

    def make_manager(
        self, pool: BlockPool, group_id: int, limits: RetentionLimits
    ) -> TokenBlockManager:
        if self.max_resident_tokens is None:
            return super().make_manager(pool, group_id, limits)
        return HiddenStateManager(pool, group_id, self.block_size, limits.max_hidden_blocks)

    def describe(self, num_layers: int, used_bytes: int) -> str:
        return (
            f"{self.kind}: {self.block_size} rows per block, {self.token_bytes:,} bytes per token"
        )


class RowLayers(LayerSet):
    """Layers of rows, each with its own group, whose rows fill the block."""

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


@dataclass(frozen=True, kw_only=True)
class AttentionAndRowsSpec(FullAttentionSpec):
    """The spec of the single group of attention layers and rows; each layer has its own, too."""

    holds_rows: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        return "attention and hidden states"


class OneTable(LayerSet):
    """Attention layers, and after their pages the rows of the same tokens."""

    order = 0

    def __init__(self, attention: LayerSet, rows: RowLayers) -> None:
        self.attention, self.rows = attention, rows
        self.names = attention.names + rows.names
        self.leads = attention.leads
        rows_of_page = PAGE_TOKENS * rows.row_bytes * len(rows.names)
        self.page_bytes = attention.page_bytes + rows_of_page

    def plan(self, block_bytes: int) -> list[GroupPlan]:
        pages = block_bytes // self.page_bytes
        offset = pages * self.attention.page_bytes
        ((group, tensors),) = self.attention.plan(offset)
        tensors = [replace(t, size=block_bytes, block_stride=block_bytes) for t in tensors]
        row_bytes = pages * PAGE_TOKENS * self.rows.row_bytes
        tensors += [
            KVCacheTensor(
                size=block_bytes,
                layers=(name,),
                offset=offset + index * row_bytes,
                layer_stride=0,
                block_stride=block_bytes,
                pages_per_block=pages,
            )
            for index, name in enumerate(self.rows.names)
        ]
        spec = AttentionAndRowsSpec(**vars(group.kv_cache_spec))
        return [GroupPlan(KVCacheGroupSpec(self.names, spec), tensors)]


def share_tables(sets: list[LayerSet]) -> list[LayerSet]:
    """Join rows that share the attention layers' table to these layers; returns the sets.

    Raises ValueError if the other layers do not share one table.
    """
    sharing = [s for s in sets if isinstance(s, RowLayers) and s.spec.shares_table]
    if not sharing:
        return sets
    others = [s for s in sets if s not in sharing]
    if len(others) != 1 or len(sharing) != 1 or not others[0].leads:
        kinds = ", ".join(f"{len(s.names)} from {s.names[0]} on" for s in others)
        raise ValueError(
            "disable_hybrid_kv_cache_manager=True: hidden states can share the block table of "
            f"attention layers that all keep the same tokens, but this model's layers ({kinds}) do "
            "not; leave the option out, and use connectors that subclass SupportsHMA"
        )
    if others[0].spreads_tokens:
        raise ValueError(
            "disable_hybrid_kv_cache_manager=True with decode_context_parallel_size or "
            "prefill_context_parallel_size above 1: hidden states are on one rank and do not share "
            "the block table of tokens that are spread over several; leave one of the options out"
        )
    return [OneTable(others[0], sharing[0])]
