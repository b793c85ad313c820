"""Phi 1, 1.5 and 2: attention and MLP side by side behind one layer norm, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class PhiForCausalLM(DecoderForCausalLM):
    """Phi-1, Phi-1.5, Phi-2."""

    head_bias: ClassVar[bool] = True
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.norm": "model.final_layernorm",
        "self_attn.o_proj": "self_attn.dense",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(qkv_bias=True, output_bias=True, qk_norm=config.qk_layernorm)
        sizes = (config.hidden_size, config.intermediate_size)
        mlp = PlainMLP(*sizes, config.hidden_act, prefix=f"{prefix}.mlp")
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size), parallel="one norm")
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp, layout=layout)

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return LayerNorm(size, eps=config.layer_norm_eps)
