"""Connectors by name, and what can be known of them before one is made."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from vllm.config import set_current_vllm_config
from vllm.config.capabilities import connector_supports_hma
from vllm.config.connectors import find_connector_class, register_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def _takes_kv_cache_config(connector_class: type[KVConnectorBase_V1]) -> bool:
    """Whether its constructor does; those that were written for early releases do not."""
    try:
        inspect.signature(connector_class).bind(None, None, None)
    except TypeError:
        return False
    return True


class KVConnectorFactory:
    """Makes the configured connectors; which there are stands in ``vllm.config.connectors``."""

    register_connector = staticmethod(register_connector)
    get_connector_class = staticmethod(find_connector_class)
    supports_hma = staticmethod(connector_supports_hma)

    @staticmethod
    def create_connector(
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> KVConnectorBase_V1:
        """One half of the configured connector."""
        if vllm_config.kv_transfer_config is None:
            raise ValueError("no connector can be made: kv_transfer_config is not set")
        connector_class = find_connector_class(vllm_config.kv_transfer_config)
        with set_current_vllm_config(vllm_config):
            if _takes_kv_cache_config(connector_class):
                return connector_class(vllm_config, role, kv_cache_config)
            return connector_class(vllm_config, role)

    @staticmethod
    def rows_leave_each_step(kv_transfer_config: KVTransferConfig) -> bool:
        """Whether hidden-state blocks may be freed after each step."""
        connector_class = find_connector_class(kv_transfer_config)
        return connector_class.capabilities(kv_transfer_config).rows_leave_each_step
