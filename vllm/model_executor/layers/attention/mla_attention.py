"""Latent attention over the KV pool (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.forward_context import current_adapters, get_forward_context
from vllm.model_executor.layers.attention.spread_attention import attend_spread
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, register_layer
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import divide
from vllm.model_executor.layers.shared_tokens import all_tokens_of_branch
from vllm.model_executor.layers.weight import Weight
from vllm.model_executor.layers.weight_share import Run, Share
from vllm.model_executor.utils import make_parameter
from vllm.ops.attention import write_kv
from vllm.ops.backends import check_attention_backend, get_paged_attention
from vllm.ops.linear import linear_by_head, make_panels, prefers_panels, weight_of_panels
from vllm.platforms.interface import asked_attention_backend
from vllm.utils.token_spread import WHOLE
from vllm.v1.kv_cache_interface import PAGE_TOKENS, MLAAttentionSpec

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.model_executor.layers.attention.token_selection import TokenSelection
    from vllm.ops.layout import SequenceLayout
    from vllm.v1.attention.backend import AttentionMetadata

_MOST_QUERY_BYTES = 64 * 2**20
"""Size of the queries in the latents' space at a time; there they are several times as wide."""


class LatentFactors(Weight):
    """``kv_b_proj`` [heads * (key_size + value_size), rank]: for each head a key's rows, then a
    value's. When it is finished, it lies in two factors, with one product per head.

    keys: [heads, rank, key_size], values: [heads, value_size, rank], or their panels.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, parameter: nn.Parameter, heads: int, key_size: int) -> None:
        super().__init__(parameter, stays_in_rows=True)
        self._heads, self._key_size = heads, key_size

    def finish(self) -> None:
        super().finish()
        self.keys, self.values = self.split(self.parameter.data)
        self.parameter.data = self.parameter.data.new_empty((0, self.shape[1]))

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``keys`` and ``values`` of rows [heads * (key_size + value_size), n]."""
        by_head = rows.view(self._heads, -1, rows.shape[1])
        keys = by_head[:, : self._key_size].transpose(1, 2).contiguous()
        values = by_head[:, self._key_size :].contiguous()
        if prefers_panels(rows.device):
            return make_panels(keys), make_panels(values)
        return keys, values

    @property
    def num_bytes(self) -> int:
        factors = self.keys.nbytes + self.values.nbytes if self.is_finished else 0
        return self.parameter.nbytes + factors

    def _floats(self, table: int) -> torch.Tensor:
        if not self.is_finished:
            return super()._floats(table)
        keys, values, (rows, rank) = self.keys, self.values, self.shape
        if keys.dim() > 3:
            keys = weight_of_panels(keys, rank, self._key_size)
            values = weight_of_panels(values, rows // self._heads - self._key_size, rank)
        return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)

    def _write(self, rows: torch.Tensor, first: int, table: int) -> None:
        if not self.is_finished:
            super()._write(rows, first, table)
            return
        whole = self._floats(table)
        whole[first : first + len(rows)].copy_(rows)
        for factor, new in zip((self.keys, self.values), self.split(whole), strict=True):
            factor.copy_(new)


class LatentExpansion(Layer):
    """The checkpoint's ``kv_b_proj``, which makes keys and values of latents, in two factors.

    Latents are multiplied with neither factor. :meth:`absorb_queries` brings queries into the
    latents' space, and :meth:`expand_values` brings what was mixed there out of it. heads: the
    number on all ranks.
    """

    def __init__(self, heads: int, key_size: int, value_size: int, rank: int, prefix: str) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.heads = divide(heads, ranks, f"the heads of {prefix!r}")
        self.rank, self.key_size, self.value_size = rank, key_size, value_size
        rows = self.heads * (key_size + value_size)
        start = get_tensor_model_parallel_rank() * rows
        self.share = Share((ranks * rows, rank), (Run(start, rows, 0),))
        self.weight = make_parameter(torch.empty(rows, rank), self.weight_loader)
        self.factors = LatentFactors(self.weight, self.heads, key_size)

    def weight_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Keep the rows of this rank's heads."""
        self.factors.load([(loaded_weight, self.share)])

    def absorb_queries(self, heads: slice, query: torch.Tensor, out: torch.Tensor) -> None:
        """``query K`` for some heads: [tokens, heads, key_size] -> out [tokens, heads, rank]."""
        linear_by_head(query, self._of_heads(self.factors.keys, heads), out)
        if self.factors.is_adapted and (adapters := current_adapters()) is not None:
            for part, rows in adapters.parts_of(self.factors, 0, len(query)):
                part.add_to_queries(heads, query, rows, out)

    def expand_values(self, heads: slice, mixed: torch.Tensor, out: torch.Tensor) -> None:
        """``V mixed`` for some heads: [tokens, heads, rank] -> out [tokens, heads, value_size]."""
        linear_by_head(mixed, self._of_heads(self.factors.values, heads), out)
        if self.factors.is_adapted and (adapters := current_adapters()) is not None:
            for part, rows in adapters.parts_of(self.factors, 0, len(mixed)):
                part.add_to_values(heads, mixed, rows, out)

    def _of_heads(self, factor: torch.Tensor, heads: slice) -> torch.Tensor:
        return factor if heads.stop - heads.start >= self.heads else factor[heads]


class MLAAttention(Layer, AttentionLayerBase):
    """Keeps one vector per token, ``[latent | rotated key]``, to which all heads attend.

    A head's key is ``[K latent | rotated key]`` and its value is ``V latent``; neither is computed.
    A score is ``(query K) latent + rotated query * rotated key``, and the head's output is ``V``
    times the mixture of latents. The sum is the same for all tokens of a prompt and for decoded
    ones, so the bits do not depend on where a step begins.

    scale: multiplies scores. kv_b_proj: K and V of this rank's heads. cache_config: as for
    :class:`Attention`. selects_tokens: :meth:`forward` may get a selection. ``kv_cache`` is the
    strided view [blocks, pages, 16, 1, rank + rotated].
    """

    kv_cache: torch.Tensor

    def __init__(
        self,
        kv_b_proj: LatentExpansion,
        qk_rope_head_dim: int,
        scale: float,
        cache_config: CacheConfig | None = None,
        prefix: str = "",
        *,
        selects_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.kv_b_proj = kv_b_proj
        self.rotated_size = qk_rope_head_dim
        self.scale = scale
        self.layer_name = prefix
        vllm_config = register_layer(self)
        self.spread = WHOLE if selects_tokens else vllm_config.parallel_config.token_spread
        self.attention_backend = vllm_config.attention_backend
        check_attention_backend(
            asked_attention_backend(vllm_config.attention_config.backend),
            vllm_config.device_config.device_type,
            vllm_config.model_config.dtype,
            self.latent_size,
            False,
            shares_values=True,
        )

    @property
    def latent_size(self) -> int:
        """Elements of a token's vector."""
        return self.kv_b_proj.rank + self.rotated_size

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size or PAGE_TOKENS,
            num_kv_heads=1,
            head_size=self.latent_size,
            dtype=vllm_config.model_config.dtype,
            spread=self.spread,
        )

    def forward(
        self, query: torch.Tensor, latent: torch.Tensor, selection: TokenSelection | None = None
    ) -> torch.Tensor:
        """query: [tokens, heads, key_size + rotated], the last ones rotated; latent: [tokens,
        rank + rotated], likewise, normed. selection: the tokens that each one reads; None: all
        before it. Returns [tokens, heads * value_size].
        """
        metadata: AttentionMetadata = get_forward_context().attn_metadata[self.layer_name]
        kept = all_tokens_of_branch(latent)[:, None]
        write_kv(kept, kept[..., :0], metadata.slot_mapping, self.kv_cache)
        factors = self.kv_b_proj
        output = query.new_empty((len(query), factors.heads, factors.value_size))
        head_bytes = len(query) * self.latent_size * query.element_size()
        heads_at_once = max(1, _MOST_QUERY_BYTES // max(1, head_bytes))
        for first in range(0, factors.heads, heads_at_once):
            heads = slice(first, first + heads_at_once)
            in_space, mixed = self._absorb(heads, query[:, heads])
            table = metadata.block_table
            if not self.spread.is_whole:
                where = (self.kv_cache, metadata, self.spread)
                attend_spread(in_space, *where, self.scale, 0, None, None, mixed)
            elif selection is None:
                self._attend(in_space, self.kv_cache, table, metadata.layout, mixed)
            else:
                selection.attend(self._attend, in_space, self.kv_cache, table, mixed)
            factors.expand_values(heads, mixed, output[:, heads])
        return output.flatten(1)

    def _absorb(self, heads: slice, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some heads' queries in the latents' space, and room for their mixtures."""
        factors = self.kv_b_proj
        in_space = query.new_empty((*query.shape[:2], self.latent_size))
        factors.absorb_queries(heads, query[..., : factors.key_size], in_space[..., : factors.rank])
        in_space[..., factors.rank :] = query[..., factors.key_size :]
        return in_space, query.new_empty((*query.shape[:2], factors.rank))

    def _attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        layout: SequenceLayout,
        out: torch.Tensor,
    ) -> None:
        attend = get_paged_attention(query.device.type, self.attention_backend)
        nothing = (None, None, None, None)  # window, chunks, cap, sinks
        attend(query, kv_cache, block_table, layout, self.scale, 0, *nothing, out)
