"""Checks of the options against the capabilities of platform and connector.

Platforms and connector classes declare their capabilities as attributes. Only this module checks
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, get_args

from vllm.config.cache import KVCacheLayout
from vllm.config.connectors import find_connector_class
from vllm.config.kv_transfer import KVTransferConfig
from vllm.logger import init_logger
from vllm.utils.checked import is_unset

if TYPE_CHECKING:
    from vllm.config.parallel import ParallelConfig
    from vllm.config.vllm import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import ConnectorCapabilities

logger = init_logger(__name__)

_OPTION_AGAINST_CONNECTOR = (
    "disable_hybrid_kv_cache_manager=False, but the KV connector '{connector}' does not "
    "subclass SupportsHMA; leave the option out, or use a connector that does"
)
_OPTION_AGAINST_MODEL = (
    "disable_hybrid_kv_cache_manager=True, but the model {reason}, which needs the hybrid "
    "KV-cache manager; leave the option out"
)
_CONNECTOR_AGAINST_MODEL = (
    "the KV connector '{connector}' does not subclass SupportsHMA, but the model {reason}, "
    "which needs the hybrid KV-cache manager; use a connector whose class (for MultiConnector: "
    "every one of its connectors) subclasses SupportsHMA and implements "
    "request_finished_all_groups"
)


def settle_capabilities(config: VllmConfig) -> None:
    """Refuse what cannot work on this platform with this connector; fill in options left open.

    Raises ValueError that names the option, the value and what would work.
    """
    _check_connector(config)
    _check_ranks(config)
    settle_kv_cache_layout(config)
    platform, reason = config.device_config.platform, None
    if not is_unset(config.model_config):
        platform.check_dtype(config.model_config.dtype)
        # Sliding windows do not need their own tables: their layers may keep every token, in one
        # table with the layers that read all tokens. Hidden states lie in the same blocks.
        if config.model_config.is_hybrid:
            reason = "has recurrent layers beside its attention layers"
    settle_hybrid_manager(config, reason)
    if config.cache_config.kv_cache_memory_bytes is None:
        config.cache_config.kv_cache_memory_bytes = platform.stated_pool_bytes
    if config.scheduler_config.async_scheduling is None:
        parallel = config.parallel_config
        overlaps = platform.works_beside_host or parallel.pipeline_parallel_size > 1
        is_alone = not parallel.is_external or parallel.world_size == 1
        config.scheduler_config.async_scheduling = overlaps and is_alone
    _ = config.attention_backend  # raises now if it is wrong


def settle_hybrid_manager(config: VllmConfig, reason: str | None) -> None:
    """Decide whether each group of layers may have its own block table.

    ``reason``: why the model needs these; None if it does not. Sets
    ``scheduler_config.disable_hybrid_kv_cache_manager``. ValueError: option, connector and model
    contradict each other.
    """
    scheduler_config, transfer = config.scheduler_config, config.kv_transfer_config
    option = scheduler_config.disable_hybrid_kv_cache_manager
    lacking = () if transfer is None else connectors_without_hma(transfer)
    connector, contradiction = _name_of(transfer, lacking), None
    if lacking and option is False:
        contradiction = _OPTION_AGAINST_CONNECTOR
    elif lacking and reason is not None:
        contradiction = _CONNECTOR_AGAINST_MODEL
    elif option and reason is not None:
        contradiction = _OPTION_AGAINST_MODEL
    if contradiction is not None:
        raise ValueError(contradiction.format(connector=connector, reason=reason))
    if lacking and option is None:
        logger.warning(
            "the KV connector %s does not subclass SupportsHMA: the hybrid KV-cache "
            "manager is off, all layers share one block table",
            connector,
        )
    scheduler_config.disable_hybrid_kv_cache_manager = bool(lacking) if option is None else option


def _declared(transfer: KVTransferConfig) -> ConnectorCapabilities:
    return find_connector_class(transfer).capabilities(transfer)


def _check_connector(config: VllmConfig) -> None:
    """Refuse a connector that needs calls this engine never makes, or cannot keep a row field."""
    transfer = config.connector_config
    if transfer is None:
        return
    capabilities = _declared(transfer)
    if capabilities.unsupported:
        raise ValueError(
            f"kv_connector={transfer.kv_connector!r} cannot be used: this engine never calls "
            f"{', '.join(capabilities.unsupported)}"
        )
    if config.speculative_config is None or is_unset(config.model_config):
        return
    from vllm.v1.rows.fields.layout import ALL_FIELDS

    for row_field in config.model_config.row_field_classes:
        if not {row_field.name, *ALL_FIELDS} & capabilities.keeps:
            raise ValueError(
                f"{config.model_config.option_of(row_field)}, but the KV connector "
                f"{transfer.kv_connector!r} keeps no {row_field.name} besides hidden states; use "
                "ExampleHiddenStatesConnector, or leave the option out"
            )


def _check_ranks(config: VllmConfig) -> None:
    """Refuse options that do not work for several ranks."""
    parallel, transfer = config.parallel_config, config.connector_config
    if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        _check_shared_experts(parallel)
    _check_prefill_context(config)
    _check_external(config)
    size, device = parallel.world_size, config.device_config.device_type
    if len(parallel.engines_served) > 1 and device != "cpu":
        raise ValueError(
            f"data_parallel_size={parallel.data_parallel_size} with device={device!r}: engines "
            "side by side run on CPUs only; start one server for each device, or use vllm extract"
        )
    if size == 1:
        return
    reason: str | None = None
    if device != "cpu":
        reason = f"device={device!r}: ranks run on CPUs only"
    elif transfer is not None and not _declared(transfer).takes_rows_only:
        _check_cached_parts(parallel, transfer)
    if reason is not None:
        options = (
            "tensor_parallel_size",
            "prefill_context_parallel_size",
            "pipeline_parallel_size",
        )
        used = [(name, value) for name in options if (value := getattr(parallel, name)) > 1]
        asked = ", ".join(f"{name}={value}" for name, value in used)
        raise ValueError(f"{asked} with {reason}; use {' and '.join(f'{n}=1' for n, _ in used)}")


def _check_shared_experts(parallel: ParallelConfig) -> None:
    """Refuse what engines that share experts cannot do."""
    asked = f"enable_expert_parallel with data_parallel_size={parallel.data_parallel_size}"
    if parallel.is_offline_engine:
        raise ValueError(
            f"{asked}: engines that a program makes (VLLM_DP_SIZE) share no experts; use AsyncLLM "
            "or vllm serve, tensor_parallel_size, or leave one out"
        )
    if len(parallel.engines_here) < parallel.data_parallel_size:
        numbers = ", ".join(map(str, parallel.engines_here)) or "none"
        raise ValueError(
            f"{asked} and engines on other machines or behind other servers (here: {numbers}): "
            "engines that share experts are on one machine, behind one server; leave "
            "data_parallel_size_local, data_parallel_rank and data_parallel_hybrid_lb out, or "
            "enable_expert_parallel"
        )
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"{asked} and pipeline_parallel_size={parallel.pipeline_parallel_size}: stages of "
            "several engines share no experts; use pipeline_parallel_size=1, or leave "
            "enable_expert_parallel out"
        )


def _check_prefill_context(config: VllmConfig) -> None:
    """Refuse what ranks that share the tokens of a step cannot do."""
    parallel = config.parallel_config
    if (size := parallel.prefill_context_parallel_size) == 1:
        return
    reason: str | None = None
    if parallel.enable_expert_parallel:
        reason = "enable_expert_parallel: ranks with other tokens share no experts"
    elif parallel.enable_sequence_parallel:
        reason = "enable_sequence_parallel: the ranks share the tokens already"
    elif not is_unset(config.model_config):
        from vllm.v1.rows.fields.layout import Field
        from vllm.v1.rows.fields.logprobs import LOGITS

        for row_field in config.model_config.row_field_classes:
            if row_field.source not in (Field.source, LOGITS):
                option = config.model_config.option_of(row_field)
                reason = f"{option}: the first rank has {row_field.name} of its own tokens alone"
    if reason is not None:
        raise ValueError(
            f"prefill_context_parallel_size={size} with {reason}; leave one of the options out"
        )


def _check_cached_parts(parallel: ParallelConfig, transfer: KVTransferConfig) -> None:
    """Refuse a connector that stores caches where ranks have other parts of them than heads and
    layers."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size", "nnodes"):
        if (value := getattr(parallel, name)) > 1:
            raise ValueError(
                f"{name}={value} with kv_connector={transfer.kv_connector!r}, which stores caches, "
                f"is not supported; use {name}=1, or a connector for rows alone"
            )
    if parallel.uses_ray:
        raise ValueError(
            f"distributed_executor_backend='ray' with kv_connector={transfer.kv_connector!r}, "
            "which stores caches, is not supported; use 'mp', or a connector for rows alone"
        )


def _check_external(config: VllmConfig) -> None:
    """Refuse what processes that all plan the same steps cannot do."""
    parallel = config.parallel_config
    if not parallel.is_external:
        return
    reason: str | None = None
    if parallel.data_parallel_size > 1:
        reason = f"data_parallel_size={parallel.data_parallel_size}: start more processes instead"
    elif parallel.world_size == 1:
        return
    elif config.connector_config is not None or config.speculative_config is not None:
        reason = "a KV connector or speculative_config: each process would write; use extract()"
    elif config.kv_events_config is not None:
        reason = "kv_events_config: each process would publish"
    elif config.lora_config.enable_lora:
        reason = "enable_lora: each process would load adapters by itself"
    elif config.scheduler_config.async_scheduling:
        reason = "async_scheduling: each step waits for the results of the one before"
    if reason is not None:
        raise ValueError(f"distributed_executor_backend='external_launcher' with {reason}")


def settle_kv_cache_layout(config: VllmConfig) -> None:
    """Choose the layout of keys and values: the option's, the connector's, or token by token.

    Sets ``cache_config.kv_cache_layout``. ValueError: option and connector contradict each other.
    """
    option, transfer, required = config.cache_config.kv_cache_layout, config.connector_config, None
    if transfer is not None:
        required = find_connector_class(transfer).get_required_kvcache_layout(config)
        known = get_args(KVCacheLayout)
        if required not in (None, *known):
            raise ValueError(
                f"kv_connector={transfer.kv_connector!r} requires the KV-cache layout "
                f"{required!r}; this engine supports {', '.join(known)}"
            )
        if option is not None and required not in (None, option):
            raise ValueError(
                f"kv_cache_layout={option!r}, but kv_connector={transfer.kv_connector!r} requires "
                f"{required!r}; leave the option out"
            )
    config.cache_config.kv_cache_layout = option or cast("KVCacheLayout | None", required) or "NHD"


def connectors_without_hma(kv_transfer_config: KVTransferConfig) -> tuple[str, ...]:
    """Class names of the connectors that cannot handle several groups of layers."""
    is_named = kv_transfer_config.is_kv_transfer_instance
    return _declared(kv_transfer_config).lacks_hma if is_named else ()


def needs_eager_steps(kv_transfer_config: KVTransferConfig | None) -> bool:
    """Return whether the connector's hooks have to be called inside every forward pass."""
    if kv_transfer_config is None or not kv_transfer_config.is_kv_transfer_instance:
        return False
    return _declared(kv_transfer_config).needs_eager_steps


def _name_of(kv_transfer_config: KVTransferConfig | None, lacking: tuple[str, ...]) -> str:
    name = None if kv_transfer_config is None else kv_transfer_config.kv_connector
    parts = [part for part in dict.fromkeys(lacking) if part != name]
    return f"{name} ({', '.join(parts)} in it)" if parts else str(name)


def connector_supports_hma(kv_transfer_config: KVTransferConfig) -> bool:
    """Return whether the connector can handle several groups of layers; True if there is none."""
    return not connectors_without_hma(kv_transfer_config)
