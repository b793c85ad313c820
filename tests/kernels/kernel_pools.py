"""Pools of poisoned bytes, the views kernels get of them, and batches of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vllm.ops.layout import SequenceLayout, StatePlan

PAGE_TOKENS = 16


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A dense tensor of NaN."""
    return torch.full(shape, float("nan"), dtype=dtype)


def strided(values: torch.Tensor, padding: int = 5) -> torch.Tensor:
    """The same values inside wider rows of NaN: the last dimension stays contiguous."""
    wide = poisoned(*values.shape[:-1], values.shape[-1] + padding, dtype=values.dtype)
    view = wide[..., 2 : 2 + values.shape[-1]]
    view.copy_(values)
    return view


def poisoned_pool(num_blocks: int, block_bytes: int) -> torch.Tensor:
    """int8 [num_blocks, block_bytes]; every element reads as NaN in any float type."""
    return torch.full((num_blocks, block_bytes), -1, dtype=torch.int8)


def pool_view(
    pool: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    offset_bytes: int = 0,
) -> torch.Tensor:
    """[blocks, *shape] of ``dtype`` over the pool's bytes; strides without the block's."""
    strides = (pool.shape[1], *strides_bytes)
    assert all(stride % dtype.itemsize == 0 for stride in (*strides, offset_bytes))
    return torch.as_strided(
        pool.view(-1).view(dtype),
        (pool.shape[0], *shape),
        tuple(stride // dtype.itemsize for stride in strides),
        offset_bytes // dtype.itemsize,
    )


@dataclass(frozen=True)
class AttentionPool:
    """Pages of one layer among ``num_layers`` that lie side by side in every page."""

    dtype: torch.dtype
    kv_heads: int
    head_size: int
    pages_per_block: int
    num_blocks: int
    num_layers: int = 3
    layer: int = 1
    value_size: int | None = None
    """Elements of a value; None: as many as of a key."""
    heads_first: bool = False
    """All of a head lies together in a block: [head, page, layer, token]."""
    pool: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        block_bytes = self.pages_per_block * self.num_layers * self.page_bytes + 64
        object.__setattr__(self, "pool", poisoned_pool(self.num_blocks, block_bytes))

    @property
    def page_bytes(self) -> int:
        """Bytes of one layer in one page."""
        return PAGE_TOKENS * self.token_bytes

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * self.content_size * self.dtype.itemsize

    @property
    def content_size(self) -> int:
        """Elements of a key and its value."""
        return self.head_size + (self.head_size if self.value_size is None else self.value_size)

    @property
    def tokens_per_block(self) -> int:
        return self.pages_per_block * PAGE_TOKENS

    @property
    def kv_cache(self) -> torch.Tensor:
        """[blocks, pages, page_tokens, kv_heads, key and value]"""
        return self.view_of(self.pool)

    def view_of(self, pool: torch.Tensor) -> torch.Tensor:
        """The same view of another pool of this size."""
        head_bytes = self.content_size * self.dtype.itemsize
        layer, page = self.page_bytes, self.num_layers * self.page_bytes
        token, head = self.token_bytes, head_bytes
        if self.heads_first:
            layer, page = layer // self.kv_heads, page // self.kv_heads
            token, head = head_bytes, page * self.pages_per_block
        return pool_view(
            pool,
            self.dtype,
            (self.pages_per_block, PAGE_TOKENS, self.kv_heads, self.content_size),
            (page, token, head, self.dtype.itemsize),
            self.layer * layer,
        )


def make_layout(query_lens: Sequence[int], contexts: Sequence[int]) -> SequenceLayout:
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    seq_lens = [query + context for query, context in zip(query_lens, contexts, strict=True)]
    return SequenceLayout(int32(starts), int32(seq_lens), max(query_lens), max(seq_lens))


def make_plan(
    blocks: Sequence[int],
    has_state: Sequence[bool],
    snapshots: Sequence[Sequence[tuple[int, int]]] | None = None,
    is_final: Sequence[bool] | None = None,
) -> StatePlan:
    """snapshots: for each request (tokens of its chunk, block), in order."""
    snapshots = snapshots or [[] for _ in blocks]
    starts = [0]
    for own in snapshots:
        starts.append(starts[-1] + len(own))
    flat = [entry for own in snapshots for entry in own]
    return StatePlan(
        block_ids=int32(blocks),
        has_state=torch.tensor(has_state, dtype=torch.bool),
        snapshot_start=int32(starts),
        snapshot_tokens=int32([tokens for tokens, _ in flat]),
        snapshot_blocks=int32([block for _, block in flat]),
        is_final=None if is_final is None else torch.tensor(is_final, dtype=torch.bool),
    )


def assert_only_changed(
    before: torch.Tensor, after: torch.Tensor, views: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """The pools differ at most where ``views`` (of before, of after) lie.

    Overwrites those places of ``before``.
    """
    for of_before, of_after in views:
        of_before.copy_(of_after)
    assert torch.equal(before, after)
