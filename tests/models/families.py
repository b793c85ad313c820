"""Every family that has a class of its own: transformers' classes, and a small config.

Imports nothing of vllm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

NUM_BYTES = 256
VOCAB_SIZE = 307
"""More than the tokenizer's 259 tokens, and odd."""


class Family(NamedTuple):
    """Names of transformers' classes, and a small config that is odd where it can be."""

    config_class: str
    model_class: str
    config: dict[str, Any]
    vision: dict[str, Any] | None = None
    """Of its vision tower, for configs that nest the one above."""


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


def _without_head_dim(**options: Any) -> dict[str, Any]:
    """For configs that derive it: 6 heads of 16."""
    config = {**_DENSE, "hidden_size": 96, **options}
    return {key: value for key, value in config.items() if key != "head_dim"}


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
}
