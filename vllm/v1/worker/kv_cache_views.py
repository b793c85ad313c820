"""The pool's one allocation, and every layer's view of it."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress

import torch

from vllm.utils.mem_utils import available_memory_bytes, format_bytes, total_memory_bytes
from vllm.v1.cache_kinds.base import KVCacheConfig, KVCacheSpec, LayerCache

HUGE_PAGE_BYTES = 2 * 2**20


def allocate_pool(config: KVCacheConfig, device: torch.device) -> torch.Tensor:
    """int8 [num_blocks, block_bytes], not initialised: nothing reads what was not written."""
    shape = (config.num_blocks, config.block_bytes)
    if device.type != "cpu" or config.size_bytes < HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=torch.int8, device=device)
    # Host memory that the kernel hands out in large pages: a state or a block is touched
    # with one fault where small pages take hundreds.
    try:
        if config.size_bytes > total_memory_bytes():  # it is had, and the process ended as it fills
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        memory = mmap.mmap(-1, config.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ValueError(
            f"a KV pool of {format_bytes(config.size_bytes)} cannot be had ({error.strerror}); "
            f"{format_bytes(available_memory_bytes())} can still be taken: lower "
            "kv_cache_memory_bytes, or raise the limit (ulimit -v, or of the control group)"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # kernels without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int8).view(shape)


def layer_views(
    pool: torch.Tensor, config: KVCacheConfig, specs: Mapping[str, KVCacheSpec]
) -> dict[str, LayerCache]:
    """Every layer's strided views, no copies. ``specs`` are the layers' own."""
    return {
        name: specs[name].layer_views(pool, config.tensor_of_layer[name], name)
        for group in config.kv_cache_groups
        for name in group.layer_names
    }
