"""Configuration objects: one file each, checked when they are made."""

from __future__ import annotations

from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig
from vllm.config.device import DeviceConfig
from vllm.config.ec_transfer import ECTransferConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig, ModelDType
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import DraftModelConfig, SpeculativeConfig
from vllm.config.vllm import (
    VllmConfig,
    get_current_vllm_config,
    get_current_vllm_config_or_none,
    get_layers_from_vllm_config,
    set_current_vllm_config,
)

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "CompilationConfig",
    "DeviceConfig",
    "DraftModelConfig",
    "ECTransferConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "LoadConfig",
    "ModelConfig",
    "ModelDType",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "VllmConfig",
    "get_current_vllm_config",
    "get_current_vllm_config_or_none",
    "get_layers_from_vllm_config",
    "set_current_vllm_config",
]
