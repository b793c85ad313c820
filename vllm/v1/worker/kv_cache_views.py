"""The pool's one allocation, and every layer's view of it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from contextlib import suppress

import torch

from vllm.v1.core.kv_cache_utils import page_runs
from vllm.v1.kv_cache_interface import (
    PAGE_TOKENS,
    AttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
)

HUGE_PAGE_BYTES = 2 * 2**20

LayerCache = torch.Tensor | tuple[torch.Tensor, ...]


def allocate_pool(config: KVCacheConfig, device: torch.device) -> torch.Tensor:
    """int8 [num_blocks, block_bytes], not initialised: nothing reads what was not written."""
    shape = (config.num_blocks, config.block_bytes)
    if device.type != "cpu" or config.size_bytes < HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=torch.int8, device=device)
    # Host memory that the kernel hands out in large pages: a state or a block is touched
    # with one fault where small pages take hundreds.
    memory = mmap.mmap(-1, config.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # kernels without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int8).view(shape)


def layer_views(
    pool: torch.Tensor, config: KVCacheConfig, specs: Mapping[str, KVCacheSpec]
) -> dict[str, LayerCache]:
    """A strided view for each layer, no copies. ``specs`` are the layers' own.

    Attention: [blocks, pages, 16, kv_heads, 2 * head_size]. Recurrent: one
    [blocks, *shape] for each state tensor. Hidden states: [blocks, rows, layers, hidden].
    """
    views: dict[str, LayerCache] = {}
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            tensor = config.tensor_of_layer[name]
            spec = specs[name]
            if isinstance(spec, AttentionSpec):
                views[name] = _attention_view(pool, tensor, name, spec)
            elif isinstance(spec, MambaSpec):
                views[name] = _state_views(pool, tensor, name, spec)
            elif isinstance(spec, HiddenStateCacheSpec):
                rows = group.kv_cache_spec.block_size
                shape = (rows, spec.num_kv_heads, spec.head_size)
                views[name] = _view(pool, spec.dtype, tensor.offset, tensor.block_stride, shape)
    return views


def _view(
    pool: torch.Tensor,
    dtype: torch.dtype,
    offset_bytes: int,
    block_stride_bytes: int,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """[blocks, *shape] with ``shape`` dense inside a block."""
    flat = pool.view(-1).view(dtype)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    size = dtype.itemsize
    return torch.as_strided(
        flat,
        (pool.shape[0], *shape),
        (block_stride_bytes // size, *strides),
        offset_bytes // size,
    )


def _attention_view(
    pool: torch.Tensor, tensor: KVCacheTensor, name: str, spec: AttentionSpec
) -> torch.Tensor:
    flat = pool.view(-1).view(spec.dtype)
    size = spec.dtype.itemsize
    content = 2 * spec.head_size
    start, _ = page_runs(tensor, name, spec)[0]
    return torch.as_strided(
        flat,
        (pool.shape[0], tensor.pages_per_block, PAGE_TOKENS, spec.num_kv_heads, content),
        (
            tensor.block_stride // size,
            tensor.page_stride // size,
            spec.num_kv_heads * content,
            content,
            1,
        ),
        start // size,
    )


def _state_views(
    pool: torch.Tensor, tensor: KVCacheTensor, name: str, spec: MambaSpec
) -> tuple[torch.Tensor, ...]:
    runs = page_runs(tensor, name, spec)
    return tuple(
        _view(pool, dtype, start, tensor.block_stride, shape)
        for (start, _), dtype, shape in zip(runs, spec.dtypes, spec.shapes, strict=True)
    )
