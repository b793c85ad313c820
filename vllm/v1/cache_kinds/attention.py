"""Keys and values of attention layers, in pages of 16 tokens.

NHD block | page: L0 L1 L2 ... | next 16 tokens: L0 L1 ... |    a layer's page: [16][head][K | V]
HND block | head 0: page: L0 L1 ... | next 16 tokens: L0 L1 ... | head 1: ... |      [16][K | V]

With heads first, a slice of the heads is one run of a block, over all layers: the part that another
tensor-parallel rank wants is one copy.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from vllm.utils import cdiv
from vllm.utils.math_utils import divisors
from vllm.utils.text import one_of
from vllm.utils.token_spread import WHOLE, TokenSpread
from vllm.v1.cache_kinds.base import (
    PAGE_TOKENS,
    GroupPlan,
    KVCacheDataReference,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    LayerSet,
    RetentionLimits,
    tokens_of_a_rank,
)
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    SlidingWindowManager,
    TokenBlockManager,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec, ABC):
    """Keys and values of one attention layer, ``[token, kv head, K | V]``."""

    num_kv_heads: int
    head_size: int
    """Elements of a key."""
    head_size_v: int | None = None
    """Elements of a value; None: as many as of a key; 0: only keys are kept, and values are among
    their elements (latent attention)."""
    dtype: torch.dtype
    heads_first: bool = False
    """True if a block keeps each head together ("HND"), False if each token ("NHD")."""

    @property
    def kind(self) -> str:
        return "latent attention" if self.head_size_v == 0 else "attention"

    @property
    def content_size(self) -> int:
        """Elements of one token and head: a key, and its value."""
        return self.head_size + (self.head_size if self.head_size_v is None else self.head_size_v)

    @property
    def pages_in_reach(self) -> int:
        """Pages of the tokens that a request of any length keeps; 0: it keeps all of them."""
        return 0

    @property
    def token_bytes(self) -> int:
        return self.num_kv_heads * self.content_size * self.dtype.itemsize

    def data_references(self, tensor: KVCacheTensor, name: str) -> list[KVCacheDataReference]:
        size = self.dtype.itemsize
        return [
            KVCacheDataReference(
                layer=name,
                tensor_idx=0,
                runs=self.page_runs(tensor, name),
                head_stride=tensor.head_stride or self.content_size * size,
                value_offset=None if self.head_size_v == 0 else self.head_size * size,
            )
        ]

    @property
    def group_key(self) -> Hashable:
        return type(self), self.heads_first

    def layer_set(self, layers: Mapping[str, AttentionSpec]) -> AttentionLayers:
        return AttentionLayers(layers)

    def page_runs(self, tensor: KVCacheTensor, name: str) -> tuple[tuple[int, int], ...]:
        start, length = tensor.start_of(name), PAGE_TOKENS * self.token_bytes
        heads = [0]
        if tensor.head_stride:
            length //= self.num_kv_heads
            heads = [head * tensor.head_stride for head in range(self.num_kv_heads)]
        return tuple(
            (start + head + page * tensor.page_stride, length)
            for head in heads
            for page in range(tensor.pages_per_block)
        )

    def layer_views(self, pool: torch.Tensor, tensor: KVCacheTensor, name: str) -> torch.Tensor:
        """[blocks, pages, 16, kv_heads, K | V], for either order in memory."""
        size = self.dtype.itemsize
        content = self.content_size
        token_stride, head_stride = self.num_kv_heads * content, content
        if tensor.head_stride:
            token_stride, head_stride = content, tensor.head_stride // size
        return torch.as_strided(
            pool.view(-1).view(self.dtype),
            (pool.shape[0], tensor.pages_per_block, PAGE_TOKENS, self.num_kv_heads, content),
            (
                tensor.block_stride // size,
                tensor.page_stride // size,
                token_stride,
                head_stride,
                1,
            ),
            tensor.start_of(name) // size,
        )

    def cross_layers_view(self, pool: torch.Tensor, tensor: KVCacheTensor) -> torch.Tensor:
        """[layers, blocks, pages, 16, kv_heads, K | V], of layers that are laid out alike."""
        first = self.layer_views(pool, tensor, tensor.layers[0])
        return torch.as_strided(
            first,
            (len(tensor.layers), *first.shape),
            (tensor.layer_stride // self.dtype.itemsize, *first.stride()),
            first.storage_offset(),
        )

    def describe(self, num_layers: int, used_bytes: int) -> str:
        return (
            f"{self.kind}: {num_layers} layers, {self.tokens_per_block} tokens per block, "
            f"{used_bytes // self.tokens_per_block:,} bytes per token"
        )


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A layer whose queries may look at every earlier token."""

    leads: ClassVar[int] = 2

    spread: TokenSpread = WHOLE

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        tokens = tokens_of_a_rank(vllm_config)
        return cdiv(tokens, self.block_size) * self.page_size_bytes

    @property
    def group_key(self) -> Hashable:
        return FullAttentionSpec, self.heads_first, self.spread


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """A layer that keeps one vector per token, which contains the keys and values of all heads."""

    head_size_v: int | None = 0


@dataclass(frozen=True, kw_only=True)
class LocalAttentionSpec(AttentionSpec):
    """A layer whose queries look at ``reach`` tokens at most, the last of which is their own."""

    leads: ClassVar[int] = 1
    manager: ClassVar[type[SlidingWindowManager]]

    @property
    def reach(self) -> int:
        """Number of tokens at which a query looks at most."""
        raise NotImplementedError

    def make_manager(
        self, pool: BlockPool, group_id: int, limits: RetentionLimits
    ) -> TokenBlockManager:
        return self.manager(pool, group_id, self.block_size, self.reach)

    @property
    def pages_in_reach(self) -> int:
        return cdiv(self.reach, PAGE_TOKENS)

    @property
    def group_key(self) -> Hashable:
        return type(self), self.heads_first, self.reach

    def max_blocks_per_request(self, vllm_config: VllmConfig) -> int:
        # A step's tokens are written before the reach moves past them, and it can start
        # in the middle of a block: this takes one more block.
        tokens = min(
            self.reach - 1 + vllm_config.scheduler_config.max_tokens_under_way,
            vllm_config.model_config.max_model_len,
        )
        return cdiv(tokens, self.block_size) + 1


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(LocalAttentionSpec):
    """A layer whose queries look at the last ``sliding_window`` tokens, their own included."""

    manager: ClassVar[type[SlidingWindowManager]] = SlidingWindowManager

    sliding_window: int

    @property
    def kind(self) -> str:
        return f"sliding-window attention of {self.sliding_window:,} tokens"

    @property
    def reach(self) -> int:
        return self.sliding_window


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(LocalAttentionSpec):
    """A layer whose queries look back to the last multiple of ``attention_chunk_size`` tokens."""

    manager: ClassVar[type[SlidingWindowManager]] = ChunkedLocalAttentionManager

    attention_chunk_size: int

    @property
    def kind(self) -> str:
        return f"attention inside of chunks of {self.attention_chunk_size:,} tokens"

    @property
    def reach(self) -> int:
        return self.attention_chunk_size


class AttentionLayers(LayerSet):
    """Attention layers with one block table: they have the same reach, and any heads."""

    order = 0

    def __init__(self, layers: Mapping[str, AttentionSpec]) -> None:
        self.layers = dict(layers)
        self.names = list(layers)
        self._first = next(iter(layers.values()))
        self.leads = self._first.leads
        self.spreads_tokens = not self._first.spread.is_whole
        self.page_bytes = PAGE_TOKENS * sum(spec.token_bytes for spec in layers.values())
        self._pages_in_reach = self._first.pages_in_reach
        self.fixed_bytes = self._pages_in_reach * self.page_bytes

    def fixed_blocks(self, block_bytes: int) -> float:
        return self._pages_in_reach / (block_bytes // self.page_bytes)

    def plan(self, block_bytes: int) -> list[GroupPlan]:
        """Plan one group, with one tensor per run of layers whose tokens are laid out alike."""
        pages = block_bytes // self.page_bytes
        # One spec represents the group; layers with other heads keep their own in the tensors.
        heads_first = self._first.heads_first
        spec = self._first.copy_with_new_block_size(pages * PAGE_TOKENS)
        if spec.block_size % spec.spread.interleave:
            raise ValueError(
                f"cp_kv_cache_interleave_size={spec.spread.interleave} does not divide the "
                f"{spec.block_size} tokens that a rank has of a block; use "
                f"{one_of(divisors(spec.block_size))}, or a block_size that is a multiple of it"
            )
        alike: dict[tuple[int, int], list[str]] = {}  # by (heads of a token, bytes of a token)
        for name, own in self.layers.items():
            heads = own.num_kv_heads if heads_first else 1
            alike.setdefault((heads, own.token_bytes), []).append(name)
        tensors, offset = [], 0
        for (heads, token_bytes), names in alike.items():
            layer_stride = PAGE_TOKENS * token_bytes // heads
            page_stride = layer_stride * len(names) if heads_first else self.page_bytes
            tensors.append(
                KVCacheTensor(
                    size=block_bytes,
                    layers=tuple(names),
                    offset=offset,
                    layer_stride=layer_stride,
                    block_stride=block_bytes,
                    page_stride=page_stride,
                    pages_per_block=pages,
                    head_stride=page_stride * pages if heads_first else 0,
                )
            )
            offset += layer_stride * len(names) * (heads * pages if heads_first else 1)
        return [GroupPlan(KVCacheGroupSpec(layer_names=self.names, kv_cache_spec=spec), tensors)]
