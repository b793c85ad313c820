"""KV connectors, and access to those of this process."""

from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBaseType
from vllm.distributed.kv_transfer.kv_transfer_state import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
    is_v1_kv_transfer_group,
)

__all__ = [
    "KVConnectorBaseType",
    "ensure_kv_transfer_initialized",
    "ensure_kv_transfer_shutdown",
    "get_kv_transfer_group",
    "has_kv_transfer_group",
    "is_v1_kv_transfer_group",
]
