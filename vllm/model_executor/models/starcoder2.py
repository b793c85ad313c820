"""StarCoder2: Llama with layer norms, biases, and an MLP without a gate."""

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


class Starcoder2ForCausalLM(DecoderForCausalLM):
    """StarCoder2 3B, 7B and 15B."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.use_bias,
            output_bias=config.use_bias,
            sliding_window=config.sliding_window,
        )
        sizes = (config.hidden_size, config.intermediate_size)
        mlp = PlainMLP(*sizes, config.hidden_act, bias=config.use_bias, prefix=f"{prefix}.mlp")
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp, layout=layout)

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return LayerNorm(size, eps=config.norm_epsilon)
