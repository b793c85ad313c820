"""EngineArgs: every option of an engine, once, for Python and for the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar, get_type_hints

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.platforms.interface import Platform
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import add_field_flag, field_docs, flag_keywords
from vllm.utils.text import unknown_key_message

ConfigT = TypeVar("ConfigT")

_OWNERS: tuple[Any, ...] = (
    ModelConfig,
    CacheConfig,
    SchedulerConfig,
    ParallelConfig,
    LoadConfig,
    DeviceConfig,
    AttentionConfig,
)
"""Configs whose fields are options by themselves; each name belongs to the first that has it."""
_OTHER_OPTIONS = ("Engine", "What is extracted, where it goes, and the engine around it.")
"""Title and description of the options that belong to none of them."""
_CONFIG_NAMES = {
    "kv_cache_dtype": "cache_dtype",
    "scheduling_policy": "policy",
    "attention_backend": "backend",
}
"""Option -> field of its config, where the two differ."""
_SHORT_FLAGS = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp"}
_ONLY_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "enable_expert_parallel": (False,),
    "distributed_executor_backend": (None, "uni"),
}
"""Options of which an engine does not support every value that its config can hold."""


@dataclass
class EngineArgs:
    """Options of an engine. Meaning and default of each are those of its config's field.

    Nothing is checked before :meth:`create_engine_config`.
    """

    model: str
    # ModelConfig
    tokenizer: str | None = None
    tokenizer_mode: str = ModelConfig.tokenizer_mode
    skip_tokenizer_init: bool = ModelConfig.skip_tokenizer_init
    trust_remote_code: bool = ModelConfig.trust_remote_code
    model_impl: str = ModelConfig.model_impl
    dtype: Any = "auto"
    seed: int = ModelConfig.seed
    revision: str | None = None
    code_revision: str | None = None
    tokenizer_revision: str | None = None
    max_model_len: int | None = None
    enforce_eager: bool = ModelConfig.enforce_eager
    served_model_name: list[str] | str | None = None
    hf_overrides: dict[str, Any] | Callable[[Any], Any] = field(default_factory=dict)
    hf_token: bool | str | None = None
    max_logprobs: int = 20
    generation_config: str = ModelConfig.generation_config
    disable_sliding_window: bool = ModelConfig.disable_sliding_window
    # CacheConfig
    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | str | None = None
    kv_cache_dtype: str = CacheConfig.cache_dtype
    enable_prefix_caching: bool = CacheConfig.enable_prefix_caching
    prefix_caching_hash_algo: str = CacheConfig.prefix_caching_hash_algo
    num_gpu_blocks_override: int | None = None
    attn_pack_size: int | None = None
    mamba_block_size: int | None = None
    mamba_cache_dtype: str = CacheConfig.mamba_cache_dtype
    mamba_ssm_cache_dtype: str = CacheConfig.mamba_ssm_cache_dtype
    hidden_state_cache_bytes: int | str | None = None
    kv_offloading_size: float | None = None
    kv_offloading_backend: str | None = None
    # SchedulerConfig
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    enable_chunked_prefill: bool = SchedulerConfig.enable_chunked_prefill
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = SchedulerConfig.policy
    disable_hybrid_kv_cache_manager: bool | None = None
    async_scheduling: bool | None = SchedulerConfig.async_scheduling
    # ParallelConfig
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    enable_expert_parallel: bool = ParallelConfig.enable_expert_parallel
    distributed_executor_backend: str | None = None
    # LoadConfig, DeviceConfig, AttentionConfig
    load_format: str = LoadConfig.load_format
    download_dir: str | None = None
    ignore_patterns: list[str] | str | None = None
    use_tqdm_on_load: bool = LoadConfig.use_tqdm_on_load
    device: str = DeviceConfig.device
    attention_backend: str | None = None
    # Configs of their own: a dict, its JSON, or the object
    speculative_config: dict[str, Any] | str | SpeculativeConfig | None = None
    """Hidden states to extract: {"method": "extract_hidden_states", "draft_model_config": ...}."""
    kv_transfer_config: dict[str, Any] | str | KVTransferConfig | None = None
    """KV connector: {"kv_connector": ..., "kv_role": ..., "kv_connector_extra_config": ...}."""
    additional_config: dict[str, Any] = field(default_factory=dict)
    """Options of out-of-tree parts."""
    # The engine around the configs
    disable_log_stats: bool = False
    """Do not log throughput and use of the pool."""

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
        """As the constructor; an unknown name is a ValueError with the nearest known one."""
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise ValueError(unknown_key_message("engine options", name, known))
        if "model" not in kwargs:
            raise ValueError("model is missing; give a checkpoint folder or a hub id")
        return cls(**kwargs)

    @classmethod
    def add_cli_args(
        cls, parser: argparse.ArgumentParser, left_out: Collection[str] = ()
    ) -> argparse.ArgumentParser:
        """Add a flag for every option but ``left_out`` to ``parser``, in a group for each
        config; returns it."""
        hints, owner_hints, docs = get_type_hints(cls), _owner_hints(), _option_docs(cls)
        groups: dict[str, argparse._ArgumentGroup] = {}
        for option in fields(cls):
            if option.name in left_out:
                continue
            title, about = _group_of(option.name)
            if title not in groups:
                groups[title] = parser.add_argument_group(title, about)
            owner_hint = owner_hints.get(_CONFIG_NAMES.get(option.name, option.name))
            has_choices = "choices" in flag_keywords(owner_hint)
            hint = owner_hint if has_choices else hints[option.name]
            short_flag = _SHORT_FLAGS.get(option.name)
            add_field_flag(groups[title], option, hint, docs[option.name], short_flag)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The options among ``args``, which may hold others; missing ones keep their default."""
        given = vars(args)
        options = {f.name: given[f.name] for f in fields(cls) if f.name in given}
        if options.get("model") is None:
            raise ValueError("--model is missing; give a checkpoint folder or a hub id")
        return cls(**options)

    def create_engine_config(self) -> VllmConfig:
        """Check everything; ValueError names the option, the value and what would work."""
        load_general_plugins()
        for option, supported in _ONLY_SUPPORTED.items():
            value = getattr(self, option)
            if value not in supported:
                raise ValueError(
                    f"{option}={value!r} is not supported yet; "
                    f"use {' or '.join(repr(v) for v in supported)}"
                )
        speculative = _as_config(SpeculativeConfig, "speculative_config", self.speculative_config)
        kv_transfer = _as_config(KVTransferConfig, "kv_transfer_config", self.kv_transfer_config)
        model_config = self._make(ModelConfig)
        device_config = self._make(DeviceConfig)
        scheduling = {"max_model_len": model_config.max_model_len}
        if self.max_num_batched_tokens is None and self.enable_chunked_prefill:
            default = self._default_max_num_batched_tokens(device_config.platform)
            scheduling["max_num_batched_tokens"] = default
        return VllmConfig(
            model_config=model_config,
            cache_config=self._make(CacheConfig),
            parallel_config=self._make(ParallelConfig),
            scheduler_config=self._make(SchedulerConfig, **scheduling),
            device_config=device_config,
            attention_config=self._make(AttentionConfig),
            load_config=self._make(LoadConfig),
            speculative_config=speculative,
            kv_transfer_config=kv_transfer,
            additional_config=self.additional_config,
        )

    def _default_max_num_batched_tokens(self, platform: Platform) -> int:
        return platform.default_max_num_batched_tokens

    def _make(self, config_class: type[ConfigT], **derived: Any) -> ConfigT:
        """A config from the options that are its fields, and from ``derived`` values."""
        names = {f.name for f in fields(config_class) if f.init}  # type: ignore[arg-type]
        values = {}
        for option in fields(self):
            name = _CONFIG_NAMES.get(option.name, option.name)
            if name in names:
                values[name] = getattr(self, option.name)
        return config_class(**values | derived)


@dataclass
class AsyncEngineArgs(EngineArgs):
    """Options of an engine behind a server."""

    def _default_max_num_batched_tokens(self, platform: Platform) -> int:
        return platform.default_max_num_batched_tokens_of_servers


def _group_of(name: str) -> tuple[str, str]:
    """Group of flags that an option belongs to, and one line about it."""
    field_name = _CONFIG_NAMES.get(name, name)
    for owner in _OWNERS:
        if field_name in {f.name for f in fields(owner) if f.init}:
            about = (owner.__doc__ or "").strip().splitlines()[0]
            return owner.__name__, about
    return _OTHER_OPTIONS


def _owner_hints() -> dict[str, Any]:
    """Annotation of every field of the configs whose fields are options."""
    hints: dict[str, Any] = {}
    for owner in reversed(_OWNERS):
        hints |= get_type_hints(owner)
    return hints


def _option_docs(cls: type) -> dict[str, str]:
    """Help text of each option: that of its config's field, or its own."""
    owned: dict[str, str] = {}
    for owner in reversed(_OWNERS):
        owned |= field_docs(owner)
    own = field_docs(EngineArgs)
    names = [f.name for f in fields(cls)]
    return {name: own.get(name) or owned[_CONFIG_NAMES.get(name, name)] for name in names}


def _as_config(config_class: type[ConfigT], option: str, value: object) -> ConfigT | None:
    """``value`` as a config object: a dict or its JSON is converted, an object or None stays."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{option}={value!r} is not valid JSON: {error}") from None
    if isinstance(value, Mapping):
        return config_class(**value)
    if value is None or isinstance(value, config_class):
        return value
    raise ValueError(
        f"{option}={value!r} is not valid; give a dict, its JSON, or a {config_class.__name__}"
    )
