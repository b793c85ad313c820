"""Arcee (AFM): Llama with squared ReLU and no gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vllm.model_executor.models.decoder_block import AttentionOptions, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ArceeForCausalLM(DecoderForCausalLM):
    """Arcee AFM-4.5B."""

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.attention_bias, output_bias=config.attention_bias
        )
        sizes = (config.hidden_size, config.intermediate_size)
        mlp = PlainMLP(*sizes, config.hidden_act, bias=config.mlp_bias, prefix=f"{prefix}.mlp")
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp)
