"""Upstream's name for the connector that stores blocks in files."""

from vllm.distributed.kv_transfer.kv_connector.v1.shared_storage_connector import (
    SharedStorageConnector,
)

ExampleConnector = SharedStorageConnector

__all__ = ["ExampleConnector", "SharedStorageConnector"]
