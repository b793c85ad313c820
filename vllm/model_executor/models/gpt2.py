"""GPT-2: learned positions, layer norms, weights that are stored [inputs, outputs]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM, LearnedPositions
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import StackedParams, require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class GPT2LMHeadModel(DecoderForCausalLM):
    """GPT-2 in all sizes, DistilGPT-2, and others of their shape."""

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
    checkpoint_base: ClassVar[str] = "transformer."
    floats_are_transposed: ClassVar[bool] = True

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        require_option(config, add_cross_attention=False)
        scale = 1.0
        if config.scale_attn_weights:
            scale = vllm_config.model_config.get_head_size() ** -0.5
        if config.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        options = AttentionOptions(
            qkv_bias=True,
            output_bias=True,
            num_kv_heads=config.num_attention_heads,
            rotates=False,
            scale=scale,
        )
        mlp = PlainMLP(
            config.hidden_size,
            config.n_inner or 4 * config.hidden_size,
            get_act_fn(config.activation_function, "activation_function"),
            prefix=f"{prefix}.mlp",
        )
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp, layout=layout)

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return LayerNorm(size, eps=config.layer_norm_epsilon)

    def learned_positions(self, config: Any) -> LearnedPositions | None:
        return LearnedPositions(config.max_position_embeddings, config.hidden_size)

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Linear weights, [outputs, inputs] here."""
        is_linear = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        return tensor.t() if is_linear and tensor.dim() == 2 else tensor
