"""GPT-2: learned positions, layer norms, weights that are stored [inputs, outputs]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM, LearnedPositions
from vllm.model_executor.models.utils import StackedParams


class GPT2LMHeadModel(DecoderForCausalLM):
    """GPT-2 in all sizes, DistilGPT-2, and others of the same architecture."""

    supported_options: ClassVar[Mapping[str, Any]] = {"add_cross_attention": False}
    norm_class = LayerNorm
    norm_epsilon = "layer_norm_epsilon"
    mlp_class = PlainMLP
    mlp_activation = "activation_function"
    mlp_bias = True
    stacked_params: ClassVar[StackedParams] = {}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "transformer.wte",
        "model.learned_positions": "transformer.wpe",
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.qkv_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }
    floats_are_transposed: ClassVar[bool] = True

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        heads, scale = config.num_attention_heads, 1.0
        if config.scale_attn_weights:
            scale = (config.hidden_size // heads) ** -0.5
        if config.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        return AttentionOptions(bias=True, num_kv_heads=heads, rotates=False, scale=scale)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        return self.dense_mlp(config, prefix, config.n_inner or 4 * config.hidden_size)

    def learned_positions(self, config: Any) -> LearnedPositions | None:
        return LearnedPositions(config.max_position_embeddings, config.hidden_size)

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Transpose linear weights to [outputs, inputs]."""
        is_linear = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        return tensor.t() if is_linear and tensor.dim() == 2 else tensor
