"""Makes connectors by name, and tells what a class can do before a connector is made."""

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
    """Return whether the constructor takes three arguments; in early releases it took two."""
    try:
        inspect.signature(connector_class).bind(None, None, None)
    except TypeError:
        return False
    return True


class KVConnectorFactory:
    """Makes the configured connectors; ``vllm.config.connectors`` lists the known classes."""

    register_connector = staticmethod(register_connector)
    get_connector_class = staticmethod(find_connector_class)
    supports_hma = staticmethod(connector_supports_hma)

    @staticmethod
    def create_connector(
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> KVConnectorBase_V1:
        """Make one side of the configured connector."""
        if vllm_config.kv_transfer_config is None:
            raise ValueError("no connector can be made: kv_transfer_config is not set")
        connector_class = find_connector_class(vllm_config.kv_transfer_config)
        with set_current_vllm_config(vllm_config):
            if _takes_kv_cache_config(connector_class):
                return connector_class(vllm_config, role, kv_cache_config)
            return connector_class(vllm_config, role)

    @staticmethod
    def rows_leave_each_step(kv_transfer_config: KVTransferConfig) -> bool:
        """Return whether hidden-state blocks may be freed after each step."""
        connector_class = find_connector_class(kv_transfer_config)
        return connector_class.capabilities(kv_transfer_config).rows_leave_each_step

    @staticmethod
    def keeps_prefixes(vllm_config: VllmConfig) -> bool:
        """Return whether what a prefix needs is kept: for the pool's own cache or a connector."""
        transfer = vllm_config.connector_config
        if vllm_config.cache_config.enable_prefix_caching or transfer is None:
            return vllm_config.cache_config.enable_prefix_caching
        return find_connector_class(transfer).capabilities(transfer).keeps_prefixes
