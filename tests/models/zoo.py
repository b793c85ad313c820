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

_BY_VALUE: list[tuple[Any, str]] = [
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (96, "hidden_size n_embd d_model dim n_embed lru_width word_embed_proj_dim project_dim"),
    (136, "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size"),
    (88, "intermediate_size_mlp shared_intermediate_size"),
    (NUM_LAYERS, "num_hidden_layers n_layer n_layers decoder_layers encoder_layers"),
    (6, "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads"),
    (2, "num_key_value_heads num_kv_heads"),
    (16, "head_dim attention_head_dim kv_channels"),
    (MAX_LENGTH, "max_position_embeddings n_positions max_seq_len seq_length"),
    (6, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_selected_experts moe_topk moe_k"),
    (1, "n_group topk_group first_k_dense_replace num_dense_layers"),
    (40, "moe_intermediate_size moe_shared_expert_intermediate_size"),
    (56, "shared_expert_intermediate_size expert_ffn_hidden_size"),
    (32, "kv_lora_rank"),
    (24, "q_lora_rank qk_nope_head_dim hidden_size_per_layer_input linear_value_head_dim"),
    (24, "sliding_window window_size"),
    (64, "attention_chunk_size"),
    (8, "qk_rope_head_dim time_step_rank mamba_dt_rank"),
    (20, "v_head_dim"),
    (16, "index_head_dim linear_key_head_dim mamba_chunk_size chunk_size"),
    (16, "mamba_d_head mamba_head_dim mamba_headdim mamba_d_state state_size ssm_state_size"),
    (12, "mamba_n_heads mamba_num_heads"),
    (2, "mamba_n_groups n_groups linear_num_key_heads"),
    (9, "index_n_heads"),
    (6, "linear_num_value_heads"),
    (192, "mamba_d_ssm"),
    (25, "index_topk"),
    (0, "num_kv_shared_layers"),
    (1, "pad_token_id"),
    (2, "bos_token_id"),
    (258, "eos_token_id"),
    (True, "use_cache"),
    (False, "tie_word_embeddings"),
]
SIZES = {name: value for value, names in _BY_VALUE for name in names.split()}
"""Settings of every config that has something of that name."""

_DECODERS = """bert bert-generation camembert electra ernie roberta roberta-prelayernorm xlm-roberta
rembert roformer megatron-bert big_bird data2vec-text xlm-roberta-xl"""
_LINEAR_ATTENTION = """qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text olmo_hybrid"""

EXTRA: dict[str, dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in _DECODERS.split()},
    **{
        name: {"layer_types": ["linear_attention", "full_attention"] * 2}
        for name in _LINEAR_ATTENTION.split()
    },
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8, "n_head": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            f"{kind}_attention": {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("sliding", "full")
        },
    },
    "cpmant": {
        "dim_ff": 136,
        "dim_head": 16,
        "num_hidden_layers": 4,
        "prompt_types": 4,
        "prompt_length": 4,
        "segment_types": 4,
    },
    "ctrl": {"dff": 136},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 56, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "num_heads": 6},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    **{
        name: {
            "swa_num_attention_heads": 6,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "rel_extent": 64,
            "unpadded_vocab_size": 300,
            "sliding_window_size": 24,
        }
        for name in ("inkling_text", "inkling2_text")
    },
    "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 16},
    "kimi_linear": {
        "linear_head_dim": 16,
        "linear_num_heads": 6,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 4, "num_hidden_layers": 8, "zero_expert_num": 2, "head_dim": 8},
    "mamba2": {"num_heads": 12, "head_dim": 16, "expand": 2, "n_groups": 2},
    "mimo_v2_flash": {"num_attention_heads": 8},
    "nemotron_h": {"sliding_window": None},  # which transformers has a name for, and no use
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "crop_size": 28,
            "num_img_tokens": 4,
            "feature_layer": -1,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "nemo_conv_channels": 8,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
        },
    },
    **{
        name: {
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 32,
            "indexer_compress_ratio": 4,
            "hc_lowrank": 8,
        }
        for name in ("qwen4_exp", "qwen4_exp_text")
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 64]},
    "roc_bert": {
        "is_decoder": True,
        "pronunciation_vocab_size": 31,
        "pronunciation_embed_dim": 24,
        "shape_vocab_size": 37,
        "shape_embed_dim": 24,
    },
    "xglm": {"num_layers": 4, "attention_heads": 6},
    "xlm": {"n_heads": 6, "emb_dim": 96, "n_words": VOCABULARY},
    "xlnet": {"d_inner": 136},
    "xmod": {"is_decoder": True, "default_language": "en_XX", "languages": ["en_XX"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # some are drawn below around the mean of what they were
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
    """Draw every weight: matrices keep the scale of their input, norms vary around theirs."""
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
