"""GPT-NeoX and Pythia: attention and MLP side by side, rotation of a head's first quarter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.utils import StackedParams
from vllm.model_executor.utils import check_shape


class GPTNeoXForCausalLM(DecoderForCausalLM):
    """GPT-NeoX-20B, Pythia, Dolly, RedPajama-INCITE."""

    norm_class = LayerNorm
    norm_epsilon = "layer_norm_eps"
    mlp_class = PlainMLP
    mlp_bias = True
    stacked_params: ClassVar[StackedParams] = {}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "gpt_neox.embed_in",
        "model.layers": "gpt_neox.layers",
        "model.norm": "gpt_neox.final_layer_norm",
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "lm_head": "embed_out",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        heads = config.num_attention_heads
        return AttentionOptions(bias=config.attention_bias, num_kv_heads=heads)

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        return replace(
            super().block_layout(config, index),
            parallel="two norms" if config.use_parallel_residual else "no",
        )

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder [query, key, value] of each head to all queries, all keys, all values."""
        if ".query_key_value." not in name:
            return tensor
        config = self.config
        check_shape(tensor, (3 * config.hidden_size, *tensor.shape[1:]))
        by_head = tensor.reshape(config.num_attention_heads, 3, -1, *tensor.shape[1:])
        return by_head.transpose(0, 1).reshape(tensor.shape)
