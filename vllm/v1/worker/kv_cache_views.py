"""The pool's one allocation, and every layer's view of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vllm.utils.host_memory import allocate_host_bytes
from vllm.v1.cache_kinds.base import KVCacheConfig, KVCacheSpec, LayerCache


def allocate_pool(config: KVCacheConfig, device: torch.device) -> torch.Tensor:
    """int8 [num_blocks, block_bytes], not initialised: nothing reads what was not written."""
    shape = (config.num_blocks, config.block_bytes)
    if device.type != "cpu":
        return torch.empty(shape, dtype=torch.int8, device=device)
    advice = "lower kv_cache_memory_bytes, or raise the limit (ulimit -v, or of the control group)"
    return allocate_host_bytes(config.size_bytes, "a KV pool", advice).view(shape)


def layer_views(
    pool: torch.Tensor, config: KVCacheConfig, specs: Mapping[str, KVCacheSpec]
) -> dict[str, LayerCache]:
    """Every layer's strided views, no copies. ``specs`` are the layers' own."""
    return {
        name: specs[name].layer_views(pool, config.tensor_of_layer[name], name)
        for group in config.kv_cache_groups
        for name in group.layer_names
    }
