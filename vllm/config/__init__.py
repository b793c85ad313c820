"""Configuration objects: one file each, checked when they are made."""

from __future__ import annotations

from vllm.config.attention import AttentionConfig as AttentionConfig
from vllm.config.cache import CacheConfig as CacheConfig
from vllm.config.compilation import CompilationConfig as CompilationConfig
from vllm.config.device import DeviceConfig as DeviceConfig
from vllm.config.ec_transfer import ECTransferConfig as ECTransferConfig
from vllm.config.kv_events import KVEventsConfig as KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig as KVTransferConfig
from vllm.config.load import LoadConfig as LoadConfig
from vllm.config.lora import LoRAConfig as LoRAConfig
from vllm.config.model import ModelConfig as ModelConfig
from vllm.config.model import ModelDType as ModelDType
from vllm.config.parallel import ParallelConfig as ParallelConfig
from vllm.config.scheduler import SchedulerConfig as SchedulerConfig
from vllm.config.speculative import DraftModelConfig as DraftModelConfig
from vllm.config.speculative import SpeculativeConfig as SpeculativeConfig
from vllm.config.vllm import VllmConfig as VllmConfig
from vllm.config.vllm import get_current_vllm_config as get_current_vllm_config
from vllm.config.vllm import get_current_vllm_config_or_none as get_current_vllm_config_or_none
from vllm.config.vllm import get_layers_from_vllm_config as get_layers_from_vllm_config
from vllm.config.vllm import set_current_vllm_config as set_current_vllm_config
