"""Every family that has a class of its own: transformers' classes, and a small config.

Imports nothing of vllm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.grids import at_night

NUM_BYTES = 256
VOCAB_SIZE = 307
"""More than the tokenizer's 259 tokens, and odd."""


class Family(NamedTuple):
    """Names of transformers' classes, and a small config that is odd where it can be."""

    config_class: str
    model_class: str
    config: dict[str, Any]
    vision: dict[str, Any] | None = None
    """Config of its vision tower, for configs that nest the one above."""


_DENSE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 136,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": NUM_BYTES + 2,
    "bos_token_id": None,
    "pad_token_id": None,
}

_HYBRID: dict[str, Any] = {
    **_DENSE,
    "num_hidden_layers": 5,
    "layer_types": [
        "linear_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
        "full_attention",
    ],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}

VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 72,
    "num_position_embeddings": 16,
}

FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", _DENSE),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {**_DENSE, "sliding_window": 24}),
    "qwen2": Family(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**_DENSE, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", _DENSE),
    "qwen3_5": Family("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _HYBRID),
    "qwen3_5_vl": Family("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", _HYBRID, VISION),
}


_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

_GEMMA_3 = {
    **_DENSE,
    "sliding_window": 24,
    "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
    },
}


_GEMMA_4 = {
    **_DENSE,
    "pad_token_id": 0,
    "num_hidden_layers": 5,
    "sliding_window": 24,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 20,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 3.0,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", *["sliding"] * 2, "full")],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 50000.0,
            "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
    },
}
_LLAMA_4 = {
    **_DENSE,
    "intermediate_size_mlp": 120,
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0, 1, 0],
    "attention_chunk_size": 40,
    "floor_scale": 10,
    "attn_scale": 0.7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}


def _without_head_dim(**options: Any) -> dict[str, Any]:
    """For configs that derive it: 6 heads of 16."""
    config = {**_DENSE, "hidden_size": 96, **options}
    return {key: value for key, value in config.items() if key != "head_dim"}


_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_QWEN_2_VL = _without_head_dim(rope_parameters=_MROPE)
_QWEN_2_VISION = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 96,
    "num_heads": 2,
    "mlp_ratio": 2,
}
_MINISTRAL_3 = {
    **_DENSE,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.7,
    },
}
_WITH_MULTIPLIERS = _without_head_dim(
    embedding_multiplier=3.0,
    attention_multiplier=0.2,
    residual_multiplier=0.7,
    logits_scaling=5.0,
)
_FALCON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "eos_token_id": NUM_BYTES + 2,
}


FAMILIES |= {
    "mixtral": Family(
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_DENSE, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "qwen2_moe": Family(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        _without_head_dim(**_MOE, shared_expert_intermediate_size=56, mlp_only_layers=[1]),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_DENSE, **_MOE, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "olmoe": Family(
        "OlmoeConfig",
        "OlmoeForCausalLM",
        _without_head_dim(num_experts=6, num_experts_per_tok=3),
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_HYBRID, **_MOE, "shared_expert_intermediate_size": 56},
    ),
    "qwen3_5_moe_vl": Family(
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        {**_HYBRID, **_MOE, "shared_expert_intermediate_size": 56},
        VISION,
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_HYBRID,
            **_MOE,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
        },
    ),
    "gemma": Family("GemmaConfig", "GemmaForCausalLM", _DENSE),
    "gemma2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **_DENSE,
            "sliding_window": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 20,
            "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")],
        },
    ),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA_3),
    "gemma3_vl": Family(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        _GEMMA_3,
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    ),
    "gemma4": Family("Gemma4TextConfig", "Gemma4ForCausalLM", _GEMMA_4),
    "gemma4_moe": Family(
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **_GEMMA_4,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 3,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "gemma4_vl": Family(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        _GEMMA_4,
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
        },
    ),
    "gpt_oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_DENSE,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "swiglu_limit": 1.5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", _without_head_dim(sliding_window=24)),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM", _without_head_dim()),
    "olmo3": Family(
        "Olmo3Config",
        "Olmo3ForCausalLM",
        _without_head_dim(
            sliding_window=24,
            layer_types=[f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")],
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        ),
    ),
    "granite": Family("GraniteConfig", "GraniteForCausalLM", {**_WITH_MULTIPLIERS}),
    "granite_moe": Family(
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {**_WITH_MULTIPLIERS, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "granite_moe_shared": Family(
        "GraniteMoeSharedConfig",
        "GraniteMoeSharedForCausalLM",
        {
            **_WITH_MULTIPLIERS,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 56,
        },
    ),
    "cohere": Family(
        "CohereConfig", "CohereForCausalLM", _without_head_dim(use_qk_norm=True, logit_scale=0.3)
    ),
    "cohere2": Family(
        "Cohere2Config",
        "Cohere2ForCausalLM",
        _without_head_dim(
            sliding_window=24, layer_types=["full_attention", "sliding_attention"] * 2
        ),
    ),
    "smollm3": Family(
        "SmolLM3Config", "SmolLM3ForCausalLM", _without_head_dim(no_rope_layers=[1, 0, 0, 1])
    ),
    "glm": Family("GlmConfig", "GlmForCausalLM", _DENSE),
    "glm4": Family("Glm4Config", "Glm4ForCausalLM", _DENSE),
    "glm4_moe": Family(
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            **_DENSE,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
        },
    ),
    "ernie4_5": Family("Ernie4_5Config", "Ernie4_5ForCausalLM", {**_DENSE, "use_bias": True}),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            **_DENSE,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "hunyuan": Family("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", _DENSE),
    "hunyuan_moe": Family(
        "HunYuanMoEV1Config",
        "HunYuanMoEV1ForCausalLM",
        {**_DENSE, "num_experts": 5, "moe_topk": 2},
    ),
    "starcoder2": Family(
        "Starcoder2Config", "Starcoder2ForCausalLM", _without_head_dim(sliding_window=24)
    ),
    "openai_gpt": Family(
        "OpenAIGPTConfig",
        "OpenAIGPTLMHeadModel",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 96,
            "n_layer": 4,
            "n_head": 6,
            "n_positions": 512,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "gpt2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 96,
            "n_layer": 4,
            "n_head": 6,
            "n_positions": 512,
            "n_inner": 136,
            "scale_attn_by_inverse_layer_idx": True,
            "eos_token_id": NUM_BYTES + 2,
        },
    ),
    "opt": Family(
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 96,
            "word_embed_proj_dim": 96,
            "ffn_dim": 136,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "max_position_embeddings": 512,
            "eos_token_id": NUM_BYTES + 2,
        },
    ),
    "falcon": Family("FalconConfig", "FalconForCausalLM", {**_FALCON, "bias": True}),
    "falcon_40b": Family(
        "FalconConfig",
        "FalconForCausalLM",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM", _without_head_dim()),
    "nemotron": Family("NemotronConfig", "NemotronForCausalLM", {**_DENSE, "mlp_bias": True}),
    "arcee": Family("ArceeConfig", "ArceeForCausalLM", _without_head_dim(mlp_bias=True)),
    "seed_oss": Family("SeedOssConfig", "SeedOssForCausalLM", _DENSE),
    "exaone4": Family(
        "Exaone4Config",
        "Exaone4ForCausalLM",
        _without_head_dim(
            sliding_window=24,
            layer_types=[f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")],
        ),
    ),
    "helium": Family("HeliumConfig", "HeliumForCausalLM", {**_DENSE, "hidden_size": 96}),
    "phi": Family("PhiConfig", "PhiForCausalLM", _without_head_dim(qk_layernorm=True)),
    "stablelm": Family(
        "StableLmConfig",
        "StableLmForCausalLM",
        _without_head_dim(qk_layernorm=True, use_qkv_bias=True),
    ),
    "apertus": Family("ApertusConfig", "ApertusForCausalLM", _without_head_dim()),
    "olmo": Family("OlmoConfig", "OlmoForCausalLM", _without_head_dim()),
    "ministral": Family(
        "MinistralConfig",
        "MinistralForCausalLM",
        {
            **_DENSE,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "ministral3": Family("Ministral3Config", "Ministral3ForCausalLM", _MINISTRAL_3),
    "mistral3": Family(
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {**_MINISTRAL_3, "model_type": "ministral3"},
        {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 28,
            "patch_size": 14,
        },
    ),
    "dots1": Family(
        "Dots1Config",
        "Dots1ForCausalLM",
        {
            **_DENSE,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.7,
            "sliding_window": 24,
            "max_window_layers": 2,
        },
    ),
    "qwen2_vl": Family(
        "Qwen2VLConfig", "Qwen2VLForConditionalGeneration", _QWEN_2_VL, _QWEN_2_VISION
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        _QWEN_2_VL,
        {**VISION, "num_heads": 2, "window_size": 56, "fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": Family(
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {**_DENSE, "rope_parameters": _MROPE},
        {**VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeConfig",
        "Qwen3VLMoeForConditionalGeneration",
        {**_DENSE, **_MOE, "mlp_only_layers": [1], "rope_parameters": _MROPE},
        {**VISION, "deepstack_visual_indexes": [0]},
    ),
    "llama4": Family("Llama4TextConfig", "Llama4ForCausalLM", _LLAMA_4),
    "llama4_vl": Family(
        "Llama4Config",
        "Llama4ForConditionalGeneration",
        _LLAMA_4,
        {
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    ),
}


_RECURRENT: dict[str, Any] = {
    **{key: value for key, value in _DENSE.items() if key != "head_dim"},
    "hidden_size": 96,
    "num_hidden_layers": 5,
}
_BAMBA: dict[str, Any] = {
    **_RECURRENT,
    "mamba_n_heads": 8,
    "mamba_d_head": 24,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 16,
    "time_step_limit": [0.3, 0.9],
}

FAMILIES |= {
    "mamba2": Family(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 96,
            "num_hidden_layers": 4,
            "num_heads": 8,
            "head_dim": 24,
            "n_groups": 2,
            "state_size": 20,
            "conv_kernel": 4,
            "chunk_size": 16,
            "use_bias": True,
            "time_step_limit": [0.3, 0.9],
            "eos_token_id": NUM_BYTES + 2,
        },
    ),
    "nemotron_h": Family(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **_DENSE,
            "layers_block_type": [
                *("linear_attention", "mlp", "full_attention", "moe", "linear_attention", "mlp"),
            ],
            "mamba_num_heads": 6,
            "mamba_head_dim": 20,
            "n_groups": 3,
            "ssm_state_size": 24,
            "conv_kernel": 4,
            "chunk_size": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 56,
            "moe_latent_size": 48,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "time_step_min": 0.4,
        },
    ),
    "bamba": Family("BambaConfig", "BambaForCausalLM", {**_BAMBA, "attn_layer_indices": [1, 4]}),
    "granite_moe_hybrid": Family(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_BAMBA,
            "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"],
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 5.0,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 56,
        },
    ),
    "falcon_h1": Family(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **_BAMBA,
            "num_hidden_layers": 4,
            "mamba_d_ssm": 192,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "lm_head_multiplier": 0.3,
            "embedding_multiplier": 2.5,
            "mlp_multipliers": [0.7, 1.4],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.3, 0.7],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.8,
        },
    ),
    "zamba2": Family(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            **_RECURRENT,
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "adapter_rank": 12,
            "use_mem_rope": True,
            "num_key_value_heads": 6,
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 20,
            "mamba_d_conv": 4,
            "chunk_size": 16,
            "time_step_min": 0.4,
            "tie_word_embeddings": True,
        },
    ),
}


FAMILIES["zamba"] = Family(
    "ZambaConfig",
    "ZambaForCausalLM",
    {
        **{key: value for key, value in _DENSE.items() if key != "head_dim"},
        "num_hidden_layers": 5,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
        "attention_head_dim": 20,
        "hidden_act": "gelu",
        "n_mamba_heads": 3,
        "mamba_d_state": 13,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 7,
        "mamba_proj_bias": True,
        "tie_word_embeddings": True,
    },
)

FAMILIES["rwkv"] = Family(
    "RwkvConfig",
    "RwkvForCausalLM",
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 72,
        "attention_hidden_size": 88,
        "intermediate_size": 136,
        "num_hidden_layers": 5,
        "context_length": 512,
        "layer_norm_epsilon": 1e-3,
        "rescale_every": 2,
        "eos_token_id": NUM_BYTES + 2,
    },
)

FAMILIES["xlstm"] = Family(
    "xLSTMConfig",
    "xLSTMForCausalLM",
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 72,
        "num_hidden_layers": 4,
        "num_blocks": 4,
        "num_heads": 3,
        "qk_dim_factor": 0.75,
        "v_dim_factor": 1.25,
        "ffn_round_up_to_multiple_of": 8,
        "ffn_proj_factor": 1.9,
        "use_bias": True,
        "chunk_size": 16,
        "gate_soft_cap": 4.0,
        "output_logit_soft_cap": 3.0,
        "eps": 1e-3,
        "eos_token_id": NUM_BYTES + 2,
        "bos_token_id": None,
        "pad_token_id": None,
    },
)

_CONVOLUTIONS = {
    "num_hidden_layers": 5,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
    "norm_eps": 1e-5,
}
_MAMBA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "num_hidden_layers": 4,
    "state_size": 13,
    "conv_kernel": 3,
    "time_step_rank": 7,
    "use_bias": True,
    "tie_word_embeddings": False,
    "eos_token_id": NUM_BYTES + 2,
}

FAMILIES |= {
    "lfm2": Family(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        _without_head_dim(
            **_CONVOLUTIONS, conv_bias=True, conv_L_cache=4, block_multiple_of=24, pad_token_id=0
        ),
    ),
    "lfm2_moe": Family(
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        _without_head_dim(**_MOE, **_CONVOLUTIONS, num_dense_layers=1, routed_scaling_factor=1.7),
    ),
    "mamba": Family("MambaConfig", "MambaForCausalLM", _MAMBA),
    "falcon_mamba": Family("FalconMambaConfig", "FalconMambaForCausalLM", _MAMBA),
    "jamba": Family(
        "JambaConfig",
        "JambaForCausalLM",
        _without_head_dim(
            num_hidden_layers=4,
            num_experts=6,
            num_experts_per_tok=3,
            attn_layer_period=2,
            attn_layer_offset=0,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=13,
            mamba_d_conv=3,
            mamba_dt_rank=7,
        ),
    ),
    "olmo_hybrid": Family(
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        _without_head_dim(
            num_hidden_layers=5,
            layer_types=_HYBRID["layer_types"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=12,
            linear_value_head_dim=24,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
    "minimax_m2": Family(
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {
            **_DENSE,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "recurrent_gemma": Family(
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        _without_head_dim(
            num_hidden_layers=5,
            block_types=["recurrent", "attention", "recurrent"],
            lru_width=72,
            conv1d_width=3,
            attention_window_size=24,
            logits_soft_cap=3.0,
            tie_word_embeddings=False,
        ),
    ),
    "minimax": Family(
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {
            **_DENSE,
            "num_hidden_layers": 5,
            "layer_types": _HYBRID["layer_types"],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "block_size": 16,
            "full_attn_alpha_factor": 0.8,
            "full_attn_beta_factor": 1.3,
            "linear_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.7,
            "mlp_alpha_factor": 0.9,
            "mlp_beta_factor": 1.4,
        },
    ),
}

_LATENT: dict[str, Any] = {
    **_DENSE,
    "num_key_value_heads": 6,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 18,
}
del _LATENT["head_dim"]
_LATENT_MOE: dict[str, Any] = {
    **_LATENT,
    "q_lora_rank": 28,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
_INDEXER = {"index_topk": 23, "index_n_heads": 9, "index_head_dim": 20}
_COUNTED_OTHERWISE = ("num_hidden_layers", "intermediate_size")
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.8,
    "mscale_all_dim": 1.2,
    "original_max_position_embeddings": 64,
}

FAMILIES |= {
    "deepseek_v2": Family(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**_LATENT_MOE, "topk_method": "group_limited_greedy", "rope_parameters": _YARN},
    ),
    "deepseek_v3": Family(
        "DeepseekV3Config", "DeepseekV3ForCausalLM", {**_LATENT_MOE, "rope_parameters": _YARN}
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        {
            **{k: v for k, v in _LATENT_MOE.items() if k != "first_k_dense_replace"},
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    ),
    "deepseek_v32": Family(
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        {**_LATENT_MOE, **_INDEXER, "rope_parameters": _YARN},
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {**_LATENT_MOE, **_INDEXER, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "minicpm3": Family(
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        {**_LATENT, "q_lora_rank": 28, "scale_emb": 3, "scale_depth": 1.9, "dim_model_base": 24},
    ),
    "longcat_flash": Family(
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {
            **{k: v for k, v in _LATENT.items() if k not in _COUNTED_OTHERWISE},
            "num_layers": 4,
            "head_dim": 12,
            "q_lora_rank": 28,
            "ffn_hidden_size": 136,
            "expert_ffn_hidden_size": 40,
            "n_routed_experts": 6,
            "zero_expert_num": 3,
            "moe_topk": 4,
            "routed_scaling_factor": 1.7,
        },
    ),
}


_DELTA_AND_LATENT: dict[str, Any] = {
    **_LATENT,
    "num_hidden_layers": 5,
    "layer_types": _HYBRID["layer_types"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}

FAMILIES |= {
    "kimi_linear": Family(
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {**_DELTA_AND_LATENT, "linear_num_heads": 3, "linear_head_dim": 20},
    ),
    "bailing_hybrid": Family(
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {**_DELTA_AND_LATENT, "head_dim": 14, "num_mtp_layers": 0},
    ),
}

_BY_DAY = {
    *("llama", "mistral", "qwen3", "qwen3_5", "qwen3_5_moe_vl", "mixtral", "gemma2", "gemma4_moe"),
    *("gpt_oss", "phi3", "olmo2", "cohere", "glm4_moe", "gpt2", "falcon", "llama4", "nemotron_h"),
    *(
        "falcon_h1",
        "zamba",
        "lfm2",
        "jamba",
        "minimax",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "deepseek_v3",
    ),
    *("deepseek_v32", "longcat_flash", "kimi_linear"),
}
SLICE = [family if family in _BY_DAY else at_night(family) for family in FAMILIES]
"""For ``parametrize``: by day those that between them have every kind of layer, at night all."""
_MIXERS_BY_DAY = {
    *("llama", "gemma2", "qwen3_5", "nemotron_h", "jamba", "minimax", "recurrent_gemma", "xlstm"),
    *("lfm2", "deepseek_v3", "deepseek_v32", "rwkv"),
}
MIXERS = [family if family in _MIXERS_BY_DAY else at_night(family) for family in FAMILIES]
"""The same for what decoding adds to extraction: by day one of each kind of cache."""
