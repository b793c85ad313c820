"""GPT-NeoX and Pythia: attention and MLP side by side, the head's first quarter rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.model_loader.weight_utils import check_shape
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import StackedParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class GPTNeoXForCausalLM(DecoderForCausalLM):
    """GPT-NeoX-20B, Pythia, Dolly, RedPajama-INCITE."""

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

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            num_kv_heads=config.num_attention_heads,
        )
        sizes = (config.hidden_size, config.intermediate_size)
        mlp = PlainMLP(*sizes, config.hidden_act, prefix=f"{prefix}.mlp")
        layout = BlockLayout(
            norm=lambda size: self.make_norm(config, size),
            parallel="two norms" if config.use_parallel_residual else "no",
        )
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp, layout=layout)

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return LayerNorm(size, eps=config.layer_norm_eps)

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """[query, key, value] of each head -> all queries, all keys, all values."""
        if ".query_key_value." not in name:
            return tensor
        config = self.config
        check_shape(tensor, (3 * config.hidden_size, *tensor.shape[1:]))
        by_head = tensor.reshape(config.num_attention_heads, 3, -1, *tensor.shape[1:])
        return by_head.transpose(0, 1).reshape(tensor.shape)
