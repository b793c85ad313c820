"""The layer that reserves room in the KV pool for captured hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, register_layer
from vllm.model_executor.layers.layer import Layer
from vllm.v1.attention.backend import CacheOnlyAttentionMetadata as CacheOnlyAttentionMetadata
from vllm.v1.kv_cache_interface import PAGE_TOKENS, HiddenStateCacheSpec
from vllm.v1.rows.fields.layout import Field

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig


def basic_cache(rows: torch.Tensor, row_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store rows of tokens in the pool.

    rows: [tokens, layers, head_size]; row_cache: [blocks, rows, layers, head_size], strided;
    slot_mapping: int64 [tokens], ``block * rows + row``, -1 to skip the token.
    """
    written = slot_mapping >= 0
    slots, rows_per_block = slot_mapping[written], row_cache.shape[1]
    row_cache[slots // rows_per_block, slots % rows_per_block] = rows[written]


class CacheOnlyAttentionLayer(Layer, AttentionLayerBase):
    """Keeps one row per token and extracted layer; does not attend.

    num_heads: number of extracted layers. head_size: elements of a row on this rank.
    max_resident_tokens: most tokens whose rows a request holds at once, if rows leave
    as they are computed; None: all. fields: other values that are kept of each token.
    cache_config: see ``Attention``.
    ``kv_cache`` is the strided view [blocks, rows, layers, head_size].
    """

    kv_cache: torch.Tensor

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        cache_config: CacheConfig | None = None,
        prefix: str = "",
        *,
        max_resident_tokens: int | None = None,
        fields: tuple[Field, ...] = (),
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.max_resident_tokens = max_resident_tokens
        self.fields = fields
        self.layer_name = prefix
        register_layer(self)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> HiddenStateCacheSpec:
        # Without the hybrid manager all layers share a table, whose blocks are never freed early.
        shares_table = bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager)
        return HiddenStateCacheSpec(
            block_size=vllm_config.cache_config.block_size or PAGE_TOKENS,
            num_kv_heads=self.num_heads,
            head_size=self.head_size,
            dtype=vllm_config.model_config.dtype,
            max_resident_tokens=None if shares_table else self.max_resident_tokens,
            shares_table=shares_table,
            fields=self.fields,
        )
