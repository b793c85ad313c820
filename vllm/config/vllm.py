"""VllmConfig: all configuration of one engine, tied together and checked as a whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from functools import cached_property
from typing import Annotated, Any, TypeVar

from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.capabilities import settle_capabilities
from vllm.config.compilation import CompilationConfig
from vllm.config.connectors import offloading_connector
from vllm.config.device import DeviceConfig
from vllm.config.ec_transfer import ECTransferConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.load import LoadConfig
from vllm.config.lora import LoRAConfig
from vllm.config.model import ModelConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import LAYER_IDS_OPTION, SpeculativeConfig
from vllm.utils import random_uuid
from vllm.utils.checked import UNSET, Fillable, config, from_mapping, is_unset
from vllm.utils.options import DERIVED

LayerT = TypeVar("LayerT")

LAYERS_OF_FULL_STEPS = 8
"""Layers that a caller may get for every token of the largest step; more make steps shorter."""


@config()
class VllmConfig:
    """One engine's configuration. ``model_config`` may be left out in tests of other parts."""

    model_config: Annotated[ModelConfig, Fillable, from_mapping(ModelConfig)] = UNSET
    cache_config: Annotated[CacheConfig, from_mapping(CacheConfig)] = field(
        default_factory=CacheConfig
    )
    scheduler_config: Annotated[SchedulerConfig, from_mapping(SchedulerConfig)] = field(
        default_factory=SchedulerConfig
    )
    parallel_config: Annotated[ParallelConfig, from_mapping(ParallelConfig)] = field(
        default_factory=ParallelConfig
    )
    load_config: Annotated[LoadConfig, from_mapping(LoadConfig)] = field(default_factory=LoadConfig)
    lora_config: Annotated[LoRAConfig, from_mapping(LoRAConfig)] = field(default_factory=LoRAConfig)
    device_config: Annotated[DeviceConfig, from_mapping(DeviceConfig)] = field(
        default_factory=DeviceConfig
    )
    attention_config: Annotated[AttentionConfig, from_mapping(AttentionConfig)] = field(
        default_factory=AttentionConfig
    )
    speculative_config: Annotated[SpeculativeConfig | None, from_mapping(SpeculativeConfig)] = None
    """Hidden states to extract: {"method": "extract_hidden_states", "draft_model_config": ...}."""
    kv_transfer_config: Annotated[KVTransferConfig | None, from_mapping(KVTransferConfig)] = None
    """KV connector: {"kv_connector": ..., "kv_role": ..., "kv_connector_extra_config": ...}."""
    ec_transfer_config: Annotated[ECTransferConfig | None, from_mapping(ECTransferConfig)] = None
    """Encoder caches: must name no connector, because models run text only."""
    kv_events_config: Annotated[KVEventsConfig | None, from_mapping(KVEventsConfig)] = None
    """Publish what enters and leaves the prefix cache: {"enable_kv_cache_events": true,
    "endpoint": ...}. Default: nothing is published."""
    additional_config: dict[str, Any] = field(default_factory=dict)
    """Options for out-of-tree code."""
    compilation_config: Annotated[CompilationConfig, DERIVED] = field(
        default_factory=CompilationConfig
    )
    instance_id: Annotated[str, DERIVED] = field(default_factory=lambda: random_uuid()[:5])
    """Name that tells engines on one machine apart, in logs and file names."""

    def __post_init__(self) -> None:
        # First, because all other checks must see the final connector.
        self._set_offloading_connector()
        settle_capabilities(self)
        self._check_layer_ids()
        self._check_balancing()
        if self.kv_events_config is not None:
            self.kv_events_config.check_ports(self.parallel_config.data_parallel_size)
        if self.load_config.load_format == "dummy" and self.model_config.quantise_at_load:
            raise ValueError(
                f"quantization={self.model_config.quantization!r} with load_format='dummy': random "
                "weights are made in the model's dtype and not quantised; leave quantization out"
            )

    def _check_balancing(self) -> None:
        way, caches = self.parallel_config.data_parallel_balancing, self.cache_config
        if way == "prefix" and not caches.enable_prefix_caching:
            raise ValueError(
                f"data_parallel_balancing={way!r} needs enable_prefix_caching; use 'least-loaded'"
            )

    @cached_property
    def attention_backend(self) -> str:
        """The attention kernels to use: the requested ones, or the device's preferred ones."""
        platform = self.device_config.platform
        return platform.choose_attention_backend(self.attention_config.backend)

    @property
    def connector_config(self) -> KVTransferConfig | None:
        """``kv_transfer_config`` if it names a connector, else None."""
        transfer = self.kv_transfer_config
        return transfer if transfer is not None and transfer.is_kv_transfer_instance else None

    @property
    def max_step_cells(self) -> int:
        """Most hidden states, one for each token and layer, that a step hands to callers.

        At least all layers of the smallest chunk of tokens that cannot be divided.
        """
        num_layers = self.model_config.get_total_num_hidden_layers() + 1
        return max(
            LAYERS_OF_FULL_STEPS * self.scheduler_config.max_num_batched_tokens,
            num_layers * self.device_config.platform.recurrent_chunk_tokens,
        )

    def set_max_model_len(self, max_model_len: int) -> None:
        """Lower the longest request to what fits in memory (``max_model_len=-1``)."""
        assert self.model_config.auto_fit_max_model_len, "only -1 leaves the length to us"
        self.model_config.max_model_len = max_model_len
        self.scheduler_config.max_model_len = max_model_len

    def _set_offloading_connector(self) -> None:
        connector = offloading_connector(self.cache_config)
        if connector is None:
            return
        transfer = self.kv_transfer_config
        if (named := self.connector_config) is not None:
            raise ValueError(
                f"kv_offloading_size={self.cache_config.kv_offloading_size} sets the KV connector "
                f"{connector.kv_connector!r}, but kv_transfer_config names "
                f"{named.kv_connector!r}; give only one of the two"
            )
        if transfer is not None:
            connector.kv_load_failure_policy = transfer.kv_load_failure_policy
            connector.kv_timeout_seconds = transfer.kv_timeout_seconds
            own = connector.kv_connector_extra_config
            connector.kv_connector_extra_config = transfer.kv_connector_extra_config | own
        self.kv_transfer_config = connector

    def _check_layer_ids(self) -> None:
        if self.speculative_config is None or is_unset(self.model_config):
            return
        num_layers = self.model_config.get_total_num_hidden_layers()
        for layer_id in self.speculative_config.hidden_state_layer_ids:
            if isinstance(layer_id, int) and not 0 <= layer_id <= num_layers:
                raise ValueError(
                    f"{LAYER_IDS_OPTION} holds {layer_id}, which this model does not have; use ids "
                    f"from 0 (the embeddings) to {num_layers} (the output of the last layer), or "
                    "'norm'"
                )


class _Local(threading.local):
    vllm_config: VllmConfig | None = None


_local = _Local()


@contextmanager
def set_current_vllm_config(vllm_config: VllmConfig) -> Iterator[VllmConfig]:
    """Make ``vllm_config`` the current one for layers built inside the block, on this thread."""
    previous, _local.vllm_config = _local.vllm_config, vllm_config
    try:
        yield vllm_config
    finally:
        _local.vllm_config = previous


def get_current_vllm_config() -> VllmConfig:
    """The configuration that :func:`set_current_vllm_config` set on this thread."""
    if _local.vllm_config is None:
        raise RuntimeError("no current VllmConfig: build models inside set_current_vllm_config")
    return _local.vllm_config


def get_current_vllm_config_or_none() -> VllmConfig | None:
    """The same configuration, or None outside of :func:`set_current_vllm_config`."""
    return _local.vllm_config


def get_layers_from_vllm_config(
    vllm_config: VllmConfig, layer_type: type[LayerT], layer_names: list[str] | None = None
) -> dict[str, LayerT]:
    """Instances of ``layer_type`` in the built model by name; if given, only ``layer_names``."""
    layers = vllm_config.compilation_config.static_forward_context
    names = layers if layer_names is None else layer_names
    unknown = [name for name in names if name not in layers]
    if unknown:
        raise ValueError(f"the model has no layers named {', '.join(unknown)}")
    return {name: layers[name] for name in names if isinstance(layers[name], layer_type)}
