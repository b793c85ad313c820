"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.qwen2_moe import QWEN_MOE_NAMES, make_qwen_mlp

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder."""

    checkpoint_names: ClassVar[Mapping[str, str]] = QWEN_MOE_NAMES

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
            sliding_window=config.sliding_window,
        )
        mlp = make_qwen_mlp(config, index, f"{prefix}.mlp")
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp)
