"""Metadata that attention and recurrent layers read in a forward pass, one object per group, and
the layouts of attention caches, under the names that third-party connectors ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm.ops.layout import SequenceLayout, StatePlan
from vllm.platforms.interface import PAGE_TOKENS


@dataclass(frozen=True)
class AttentionMetadata:
    """Metadata of the layers of one attention group for one step.

    ``block_table``: int32 [requests, max_blocks]; ``slot_mapping``: int64 [tokens].
    """

    layout: SequenceLayout
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class CacheOnlyAttentionMetadata(AttentionMetadata):
    """Metadata of a group with rows of hidden states."""


@dataclass(frozen=True)
class RecurrentMetadata:
    """Metadata of the layers of one recurrent group for one step."""

    layout: SequenceLayout
    states: StatePlan


class AttentionBackend:
    """The order of a cache's dimensions in memory; the kernels read any strides."""

    heads_first: ClassVar[bool] = False

    @classmethod
    def get_name(cls) -> str:
        """Name of the layout, which all kernels share."""
        return "HND" if cls.heads_first else "NHD"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """[blocks, pages, 16, kv_heads, K | V], for keys and values of the same width."""
        return (num_blocks, block_size // PAGE_TOKENS, PAGE_TOKENS, num_kv_heads, 2 * head_size)

    @classmethod
    def get_kv_cache_stride_order(
        cls, include_num_layers_dimension: bool = False
    ) -> tuple[int, ...]:
        """The view's dimensions in the order of memory, the longest stride first. The dimension
        of layers comes first in the view if it is included."""
        if not include_num_layers_dimension:
            return (0, 3, 1, 2, 4) if cls.heads_first else (0, 1, 2, 3, 4)
        return (1, 4, 2, 0, 3, 5) if cls.heads_first else (1, 2, 0, 3, 4, 5)


class HeadsFirstAttentionBackend(AttentionBackend):
    """The layout that keeps each head together in a block."""

    heads_first = True


def backend_of(cache: torch.Tensor) -> type[AttentionBackend]:
    """Return the layout of a view [..., pages, 16, kv_heads, K | V]."""
    heads_first = cache.shape[-2] > 1 and cache.stride(-2) > cache.stride(-3)
    return HeadsFirstAttentionBackend if heads_first else AttentionBackend
