"""The base class of connectors, under upstream's names without a version."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

KVConnectorBase = KVConnectorBase_V1
KVConnectorBaseType = KVConnectorBase_V1

__all__ = ["KVConnectorBase", "KVConnectorBaseType"]
