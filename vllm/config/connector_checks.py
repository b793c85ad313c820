"""What a KV connector means for the rest of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config.kv_transfer import KVTransferConfig
from vllm.logger import init_logger
from vllm.utils.mem_utils import GIB_BYTES

if TYPE_CHECKING:
    from vllm.config.cache import CacheConfig
    from vllm.config.model import ModelConfig
    from vllm.config.scheduler import SchedulerConfig
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)


def offloading_connector(cache_config: CacheConfig) -> KVTransferConfig | None:
    """The connector that ``kv_offloading_size`` asks for, None when nothing is offloaded."""
    size_gib, backend = cache_config.kv_offloading_size, cache_config.kv_offloading_backend
    if size_gib is None:
        return None
    size_bytes = int(size_gib * GIB_BYTES)
    known: dict[str | None, tuple[str, dict[str, Any]]] = {
        "native": ("OffloadingConnector", {"cpu_bytes_to_use": size_bytes}),
        "lmcache": (
            "LMCacheConnectorV1",
            {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": size_gib},
        ),
    }
    name, options = known.get(backend or "native", (str(backend), {"cpu_bytes_to_use": size_bytes}))
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=options)


def resolve_hybrid_manager(
    scheduler_config: SchedulerConfig,
    kv_transfer_config: KVTransferConfig | None,
    model_config: ModelConfig | None,
    speculative_config: SpeculativeConfig | None,
) -> None:
    """Decide whether each group of layers may have its own block table, and check the model.

    Fills ``scheduler_config.disable_hybrid_kv_cache_manager`` when it is None. Raises
    ValueError when the connector and the option contradict each other, or when the model
    cannot run with one block table for all layers.
    """
    connector = kv_transfer_config.kv_connector if kv_transfer_config else None
    supported = kv_transfer_config is None or connector_supports_hma(kv_transfer_config)
    if scheduler_config.disable_hybrid_kv_cache_manager is None:
        scheduler_config.disable_hybrid_kv_cache_manager = not supported
        if not supported:
            logger.warning(
                "the KV connector %s does not subclass SupportsHMA: the hybrid KV-cache "
                "manager is off, all layers share one block table",
                connector,
            )
    elif not scheduler_config.disable_hybrid_kv_cache_manager and not supported:
        raise ValueError(
            f"disable_hybrid_kv_cache_manager=False, but the KV connector {connector!r} does not "
            "subclass SupportsHMA; leave the option out, or use a connector that does"
        )
    reason = _needs_hybrid_manager(model_config, speculative_config)
    if reason is None or not scheduler_config.disable_hybrid_kv_cache_manager:
        return
    if supported:
        raise ValueError(
            f"disable_hybrid_kv_cache_manager=True, but the model {reason}, which needs the "
            "hybrid KV-cache manager; leave the option out"
        )
    raise ValueError(
        f"the KV connector {connector!r} does not subclass SupportsHMA, but the model {reason}, "
        "which needs the hybrid KV-cache manager; use a connector whose class (for MultiConnector: "
        "every one of its connectors) subclasses SupportsHMA and implements "
        "request_finished_all_groups"
    )


def connector_supports_hma(kv_transfer_config: KVTransferConfig) -> bool:
    """Whether the connector can handle several groups of layers; true without a connector."""
    if not kv_transfer_config.is_kv_transfer_instance:
        return True
    # Connectors import the configuration, so they are imported only now.
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.supports_hma(kv_transfer_config)


def _needs_hybrid_manager(
    model_config: ModelConfig | None, speculative_config: SpeculativeConfig | None
) -> str | None:
    """Why the model needs a block table per group of layers, None when it does not."""
    if model_config is not None and model_config.is_hybrid:
        return "has recurrent layers beside its attention layers"
    if model_config is not None and model_config.has_mixed_attention:
        return "mixes sliding-window and full attention"
    if speculative_config is not None:
        return "keeps extracted hidden states in blocks of their own"
    return None
