"""What the layers of a model keep in the KV pool, as plain data.

A *spec* says what one layer stores for a block of tokens; a *group* is a set of
layers that share a block table; a *tensor* says where the pages of a layer lie
inside the pool. Nothing here allocates or knows torch tensors, only dtypes.

The pool is one allocation ``int8[num_blocks, block_bytes]``. Every group overlays
it in its own way (docs/design.md, "One pool, many lenses")::

    attention group | page of 16 tokens: L0 L1 L2 ... | next 16 tokens: L0 L1 ... |
    recurrent group | state of L0 | state of L1 | ... as many as fit               |
    hidden group    | row 0 | row 1 | ...  each [layers asked, hidden]             |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from vllm.platforms.interface import PAGE_TOKENS as PAGE_TOKENS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def cdiv(a: int, b: int) -> int:
    """Smallest integer not below ``a / b``."""
    return -(-a // b)


def context_parallel_size(vllm_config: VllmConfig) -> int:
    """Ranks over which the tokens of one sequence are spread (DCP x PCP)."""
    parallel = vllm_config.parallel_config
    return parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What one layer keeps for a block of ``block_size`` tokens."""

    block_size: int
    """Tokens that one block of this layer's group holds."""
    page_size_padded: int | None = None
    """Bytes the page occupies, where that is more than what it holds."""

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of data in one page of one layer."""
        raise NotImplementedError

    @property
    def page_size_bytes(self) -> int:
        """Bytes one page of one layer is charged in the memory budget."""
        if self.page_size_padded is None:
            return self.real_page_size_bytes
        if self.page_size_padded < self.real_page_size_bytes:
            raise ValueError(
                f"page_size_padded={self.page_size_padded} is smaller than the page's "
                f"data ({self.real_page_size_bytes} bytes)"
            )
        return self.page_size_padded

    def max_blocks_per_request(self, vllm_config: VllmConfig) -> int:
        """Blocks that the longest possible request holds at once."""
        tokens = cdiv(vllm_config.model_config.max_model_len, context_parallel_size(vllm_config))
        return cdiv(tokens, self.block_size)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes that one layer of the longest possible request holds at once."""
        return self.max_blocks_per_request(vllm_config) * self.page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> KVCacheSpec:
        """The same spec for blocks of another number of tokens."""
        return replace(self, block_size=block_size)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values of one attention layer, ``[token, kv head, K | V]``."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer on this rank."""
        return 2 * self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def real_page_size_bytes(self) -> int:
        return self.block_size * self.token_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A layer whose queries may look at every earlier token."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer whose queries look at the last ``sliding_window`` tokens, their own included."""

    sliding_window: int

    def max_blocks_per_request(self, vllm_config: VllmConfig) -> int:
        # A step's tokens are written before the window moves past them, and a
        # window can start in the middle of a block: one more block.
        tokens = min(
            self.sliding_window - 1 + vllm_config.scheduler_config.max_tokens_under_way,
            vllm_config.model_config.max_model_len,
        )
        return cdiv(tokens, self.block_size) + 1


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """The recurrent state of one layer: tensors of fixed size, whatever the length.

    ``block_size`` is the number of tokens between two kept states (the snapshot
    interval); a running request holds one state a layer.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mamba_type: str = "gdn_attention"
    num_speculative_blocks: int = 0

    @property
    def state_offsets(self) -> tuple[int, ...]:
        """Byte offset of each state tensor inside a page, then the end of the last."""
        offsets = [0]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            start = cdiv(offsets[-1], dtype.itemsize) * dtype.itemsize
            offsets[-1] = start
            offsets.append(start + math.prod(shape) * dtype.itemsize)
        return tuple(offsets)

    @property
    def real_page_size_bytes(self) -> int:
        return self.state_offsets[-1]

    def max_blocks_per_request(self, vllm_config: VllmConfig) -> int:
        return 1 + self.num_speculative_blocks


@dataclass(frozen=True, kw_only=True)
class HiddenStateCacheSpec(KVCacheSpec):
    """Rows of captured hidden states: ``[token, layer asked, hidden]``, no keys, no values."""

    num_kv_heads: int
    """Number of extracted layers."""
    head_size: int
    """Elements of one row and layer on this rank (hidden size, or its tensor-parallel slice)."""
    dtype: torch.dtype
    max_resident_tokens: int | None = None
    """Most tokens whose rows one request holds at once; None: all of them."""

    @property
    def token_bytes(self) -> int:
        """Bytes of the rows of one token."""
        return self.num_kv_heads * self.head_size * self.dtype.itemsize

    @property
    def real_page_size_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def max_blocks_per_request(self, vllm_config: VllmConfig) -> int:
        whole = super().max_blocks_per_request(vllm_config)
        if self.max_resident_tokens is None:
            return whole
        return min(whole, cdiv(self.max_resident_tokens, self.block_size) + 1)


@dataclass(frozen=True, kw_only=True)
class KVCacheTensor:
    """Where the pages of some layers of one group lie in the pool.

    Page ``p`` of layer ``layers[l]`` in block ``b`` starts at byte
    ``offset + b * block_stride + p * page_stride + l * layer_stride``.
    """

    size: int
    """Bytes of the whole pool."""
    layers: tuple[str, ...]
    offset: int = 0
    layer_stride: int
    block_stride: int
    page_stride: int = 0
    pages_per_block: int = 1

    @property
    def shared_by(self) -> list[str]:
        """Upstream's name for ``layers``."""
        return list(self.layers)


@dataclass(frozen=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share a block table, and what each of them keeps."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class KVCacheDataReference:
    """Where one group's data lie inside a block, in bytes (requirements C2).

    ``layers[name]`` lists ``(offset, length)`` of each contiguous run of that layer
    inside a block; ``head_stride`` is the distance between two heads of one token
    (None for layers without heads).
    """

    layers: dict[str, tuple[tuple[int, int], ...]]
    head_stride: int | None


@dataclass(frozen=True, kw_only=True)
class KVCacheTensorReference:
    """The physical pool: one tensor, and the bytes that one block id stands for."""

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """The plan of the pool: how many blocks, and what each group sees in one."""

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]
    block_bytes: int = 0
    tensor_of_layer: dict[str, KVCacheTensor] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for tensor in self.kv_cache_tensors:
            for name in tensor.layers:
                self.tensor_of_layer[name] = tensor

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * self.block_bytes

    def group_ids(self, spec_type: type[KVCacheSpec]) -> list[int]:
        """Ids of the groups whose layers keep ``spec_type``."""
        return [
            gid
            for gid, group in enumerate(self.kv_cache_groups)
            if isinstance(group.kv_cache_spec, spec_type)
        ]

    def hidden_state_group_id(self) -> int | None:
        """Id of the group that holds captured rows, None when nothing is extracted."""
        ids = self.group_ids(HiddenStateCacheSpec)
        return ids[0] if ids else None
