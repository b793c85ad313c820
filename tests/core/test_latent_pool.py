"""A token of latent attention costs the pool its latents, and nothing for alignment."""

from __future__ import annotations

import pytest
import torch

from vllm.config import CacheConfig
from vllm.v1.core.kv_cache_utils import plan_layout
from vllm.v1.kv_cache_interface import FullAttentionSpec, HiddenStateCacheSpec, KVCacheSpec

BF16 = torch.bfloat16
LAYERS, RANK, ROTATED, HIDDEN = 61, 512, 64, 7168
"""DeepSeek-V3's."""
LATENT_BYTES = (RANK + ROTATED) * 2


def specs(num_rows: int) -> dict[str, KVCacheSpec]:
    latent = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=RANK + ROTATED, head_size_v=0, dtype=BF16
    )
    layers: dict[str, KVCacheSpec] = {f"layers.{i}": latent for i in range(LAYERS)}
    if num_rows:
        layers["hidden"] = HiddenStateCacheSpec(
            block_size=16, num_kv_heads=num_rows, head_size=HIDDEN, dtype=BF16
        )
    return layers


def test_a_token_costs_its_latents() -> None:
    plan = plan_layout(specs(0), CacheConfig())
    (group,) = plan.groups
    assert group.kv_cache_spec.block_size == 16
    assert plan.block_bytes == 16 * LAYERS * LATENT_BYTES == 16 * 70_272


@pytest.mark.parametrize("num_rows", [1, 3, 4, 6, 61, 62])
def test_rows_fill_their_blocks(num_rows: int) -> None:
    """Not padded to a layer's page, nor to a whole number of pages."""
    plan = plan_layout(specs(num_rows), CacheConfig())
    latents, rows = plan.groups
    tokens = latents.kv_cache_spec.block_size
    assert plan.block_bytes == tokens * LAYERS * LATENT_BYTES
    wanted = num_rows * HIDDEN * 2
    assert plan.block_bytes / rows.kv_cache_spec.block_size <= 1.02 * wanted
