"""Checks entries of a config.json before transformers reads them.

Errors of its classes about an impossible size name another entry, or none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_SIZE_NAMES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_heads", "linear_head_dim",
    "state_size", "ssm_state_size", "mamba_d_state", "mamba_dt_rank", "time_step_rank",
    "attention_hidden_size", "index_topk", "index_n_heads", "index_head_dim", "num_mem_blocks",
    "num_layers", "num_blocks", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads",
    "mamba_d_head", "mamba_head_dim", "mamba_headdim", "attention_head_dim", "mamba_expand",
    "expand", "attn_layer_period", "expert_layer_period", "ffn_round_up_to_multiple_of",
    "dim_model_base",
)  # fmt: skip
_COUNT_NAMES = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_latent_size",
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size",
    "n_shared_experts", "num_shared_experts", "zero_expert_num", "n_group", "num_expert_group",
    "topk_group", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "adapter_rank",
    "num_nextn_predict_layers", "attn_layer_offset", "expert_layer_offset",
)  # fmt: skip
"""Numbers of things that a model may lack."""
_EVEN_NAMES = ("qk_rope_head_dim",)
_LAYERS_NAMES = ("num_hidden_layers", "num_layers", "num_blocks", "n_layer", "n_layers")
_MOST_LAYERS = 10_000
"""Classes of transformers make a list with an entry for each layer before anything is compared."""
_ROTATION_NAMES = ("rope_parameters", "rope_scaling")
_ROTATION_KINDS = ("rope_type", "type")
_ROTATION_NUMBERS = (
    "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim",
)  # fmt: skip
WHOLE_NUMBERS = ((_SIZE_NAMES, "above 0", 1), (_COUNT_NAMES, "at least 0", 0))
"""Names, the requirement for their values in words, and the least value."""


def check_entries(content: Mapping[str, Any]) -> None:
    """Raise ValueError for a size or a number of a config.json that is not possible.

    Names are those in the file. Classes of transformers have other names for some.
    """
    for name, value in content.items():
        _check_numbers(name, value)
        for names, which, least in WHOLE_NUMBERS:
            if name in names:
                check_number(name, value, which, least)
        if name in _LAYERS_NAMES and isinstance(value, int) and value > _MOST_LAYERS:
            raise ValueError(f"config.json: {name}={value!r} has to be at most {_MOST_LAYERS:,}")
        if name in _ROTATION_NAMES and isinstance(value, Mapping):
            check_rotation(value, name)
        if name == "sliding_window" and isinstance(value, str):
            raise ValueError(f"config.json: {name}={value!r} has to be a number of tokens")
        if name in _EVEN_NAMES and isinstance(value, int) and value % 2:
            raise ValueError(f"config.json: {name}={value!r} has to be even")
        if name == "text_config" and isinstance(value, Mapping):
            check_entries(value)
        is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
        is_text = isinstance(value, str) and value
        if name == "quantization_config" and isinstance(value, list | str | int | float):
            raise ValueError(f"config.json: {name}={value!r} has to be an object")
        if name == "model_type" and not isinstance(value, str):
            raise ValueError(f"config.json: {name}={value!r} has to be a text")
        if name in ("dtype", "torch_dtype") and value is not None and not is_text:
            raise ValueError(f"config.json: {name}={value!r} has to be the name of a dtype")
        if name == "architectures" and value is not None and not is_list:
            raise ValueError(f"config.json: {name}={value!r} has to be a list of class names")


def _check_numbers(name: str, value: object) -> None:
    """Raise ValueError if ``value`` is NaN, or has one in it: nothing can be computed with it."""
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"config.json: {name}={value!r} is not a number")
    if isinstance(value, Mapping):
        for key, one in value.items():
            _check_numbers(f"{name}.{key}", one)
    if isinstance(value, list | tuple):
        for one in value:
            _check_numbers(name, one)


def check_rotation(rope: Mapping[str, Any], path: str) -> None:
    """Raise ValueError if a number of the rotation, of all layers or of a kind, is none."""
    for name, value in rope.items():
        is_number = value is None or isinstance(value, int | float)
        if isinstance(value, Mapping) and name not in _ROTATION_NUMBERS:
            check_rotation(value, f"{path}.{name}")
        elif name.endswith("_attention") and value is not None:
            raise ValueError(f"config.json: {path}: {name}={value!r} has to be an object")
        elif not is_number and (
            name in _ROTATION_NUMBERS or (isinstance(value, str) and name not in _ROTATION_KINDS)
        ):
            raise ValueError(f"config.json: {path}: {name}={value!r} has to be a number")


def check_number(name: str, value: object, which: str, least: int) -> None:
    """Raise ValueError for a value that is not as ``WHOLE_NUMBERS`` says. None passes."""
    if value is None or value == "auto" or isinstance(value, (list, tuple)):
        return  # a list has a value for each layer, which its reader checks
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"config.json: {name}={value!r} has to be a whole number {which}")
