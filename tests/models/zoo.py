"""A tiny checkpoint of every causal model that the installed transformers knows.

Found by walking ``AutoModelForCausalLM``'s mapping. A config is made by the *names* of its sizes:
what is called alike gets a small, odd value; a family is named here only where that cannot work.
Imports nothing of vllm.
"""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 307
NUM_LAYERS = 4
MAX_LENGTH = 192
MOST_WEIGHTS = 3_000_000

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "n_embed"), 96),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 136
    ),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size"), 88),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers"), NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 6),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels"), 16),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), MAX_LENGTH
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "num_selected_experts", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), 40),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size"), 56),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **{"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8},
    **{"v_head_dim": 20, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 2048},
    "sliding_window": 24,
    "attention_chunk_size": 64,
    "window_size": 24,
    **{"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 258},
    **{"use_cache": True, "tie_word_embeddings": False},
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 12),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_state"), 16),
    **{"mamba_d_ssm": 192, "mamba_n_groups": 2, "n_groups": 2, "mamba_chunk_size": 16},
    **{"chunk_size": 16, "time_step_rank": 8, "mamba_dt_rank": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 24},
    **{"lru_width": 96, "hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": VOCABULARY},
    **{"encoder_layers": NUM_LAYERS, "encoder_attention_heads": 6, "encoder_ffn_dim": 136},
    **{"num_kv_shared_layers": 0, "word_embed_proj_dim": 96, "project_dim": 96},
}

EXTRA: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "bert-generation", "camembert", "electra", "ernie"), {"is_decoder": True}),
    **dict.fromkeys(("roberta", "roberta-prelayernorm", "xlm-roberta"), {"is_decoder": True}),
    **dict.fromkeys(("rembert", "roformer", "megatron-bert", "xmod"), {"is_decoder": True}),
    **dict.fromkeys(("big_bird", "data2vec-text", "roc_bert"), {"is_decoder": True}),
    "mamba2": {"num_heads": 12, "head_dim": 16, "expand": 2, "n_groups": 2},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "num_heads": 6},
    "xglm": {"num_layers": 4, "attention_heads": 6},
    "dbrx": {"attn_config": {"kv_n_heads": 2}, "ffn_config": {"ffn_hidden_size": 56, "moe_num_experts": 6, "moe_top_k": 2}},
    "stablelm": {"num_key_value_heads": 2},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8, "n_head": 8},
    "longcat_flash": {"num_layers": 2, "num_hidden_layers": 4, "zero_expert_num": 2, "head_dim": 8},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "full_attention"] * 2},
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"),
        {"layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "jetmoe": {"kv_channels": 16, "num_local_experts": 6},
    "xlnet": {"d_inner": 136},
    "ctrl": {"dff": 136},
    "cpmant": {"dim_ff": 136, "prompt_types": 4, "prompt_length": 4, "segment_types": 4, "num_hidden_layers": 4, "dim_head": 16},
    "dots1": {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mimo_v2_flash": {"swa_num_attention_heads": 6, "swa_num_key_value_heads": 2},
    "xlm": {"n_heads": 6, "emb_dim": 96, "n_words": VOCABULARY},
    "zamba2": {"layer_types": ["mamba", "hybrid", "mamba", "hybrid"]},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "xmod": {"is_decoder": True, "default_language": "en_XX", "languages": ["en_XX"]},
}  # fmt: skip
"""Settings of families that the names of sizes do not make."""


def model_types() -> list[str]:
    """Every key of the mapping, in order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A small config of that type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    config_class = config_class.sub_configs.get("text_config", config_class)
    known = _settings_of(config_class)
    settings = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in known:  # latent attention expands to every head
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    return config_class(**{**settings, **EXTRA.get(model_type, {}), **overrides})


def _settings_of(config_class: Any) -> set[str]:
    names = set(inspect.signature(config_class.__init__).parameters)
    names |= set(getattr(config_class, "__dataclass_fields__", {}))
    return names - {"self", "kwargs"}


def make_model(model_type: str, seed: int = 0, **overrides: Any) -> Any:
    """A float32 model of that type whose every weight shows."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type, **overrides)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError(f"no tiny config is known: it would have {size:,} weights")
    model = AutoModelForCausalLM.from_config(config).float().eval()
    randomise(model, seed)
    return model


def make_checkpoint(folder: Path, model_type: str, **overrides: Any) -> Any:
    """Write a checkpoint into ``folder``; returns its model."""
    model = make_model(model_type, **overrides)
    model.config.dtype = torch.float32
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def randomise(model: Any, seed: int) -> None:
    """Draw every weight so that matrices keep the scale of their input; norms vary around theirs."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "A_log" in name or name.endswith("dt_bias"):
            weight.uniform_(math.log(0.01), math.log(0.5), generator=generator)
        elif weight.dim() <= 1:
            centre = weight.float().mean().item() if weight.numel() else 0.0
            weight.normal_(float(round(centre)), 0.2, generator=generator)
        elif "embed" in name or "wte" in name or "wpe" in name:
            weight.normal_(0.0, 0.5, generator=generator)
        else:
            weight.normal_(0.0, 1.2 * weight.shape[-1] ** -0.5, generator=generator)
