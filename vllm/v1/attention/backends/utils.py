"""The layout of caches, under the name that third-party connectors import."""

from vllm.distributed.kv_transfer.kv_connector.utils import (
    get_kv_connector_cache_layout as get_kv_cache_layout,
)

__all__ = ["get_kv_cache_layout"]
