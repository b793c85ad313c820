"""The ranks that have a worker side of the connector, and the caches that each of them has.

The values of a cache are on every rank, cut by heads, or with pipeline stages on the ranks of one
stage. Rows of hidden states are on the driver alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.config.connectors import find_connector_class
from vllm.v1.rows.fields.activations import layer_of

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.cache_kinds.base import KVCacheConfig


def has_connector(vllm_config: VllmConfig) -> bool:
    """Return whether this rank has a worker side of the configured connector."""
    transfer = vllm_config.connector_config
    return transfer is not None and has_part(vllm_config, transfer)


def has_part(vllm_config: VllmConfig, transfer: KVTransferConfig) -> bool:
    """Return whether this rank has a worker side of a connector, maybe one of several."""
    rows_only = find_connector_class(transfer).capabilities(transfer).takes_rows_only
    return not rows_only or vllm_config.parallel_config.is_driver


def is_on_all_ranks(vllm_config: VllmConfig) -> bool:
    """Return whether there are several worker sides."""
    transfer = vllm_config.connector_config
    if transfer is None or vllm_config.parallel_config.world_size == 1:
        return False
    return not find_connector_class(transfer).capabilities(transfer).takes_rows_only


def configs_of_ranks(vllm_config: VllmConfig) -> Iterator[VllmConfig]:
    """Yield the configuration of each rank."""
    for rank in range(vllm_config.parallel_config.world_size):
        config = copy.copy(vllm_config)
        config.parallel_config = replace(vllm_config.parallel_config, rank=rank)
        yield config


def plan_of_rank(vllm_config: VllmConfig, plan: KVCacheConfig) -> KVCacheConfig:
    """Return the plan of the pool with the layers whose caches this rank fills."""
    parallel = vllm_config.parallel_config
    if parallel.world_size == 1:
        return plan
    stage = vllm_config.model_config.stage_of(parallel)

    def fills(name: str) -> bool:
        if plan.spec_of(name).holds_rows:
            return parallel.is_driver
        layer = layer_of(name)
        return layer is None or stage.first_layer <= layer < stage.end_layer

    return plan.of_layers({name for name in plan.tensor_of_layer if fills(name)})
