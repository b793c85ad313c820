"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.qwen2_moe import QWEN_MOE_NAMES, make_qwen_mlp


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder."""

    checkpoint_names: ClassVar[Mapping[str, str]] = QWEN_MOE_NAMES

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        window = config.sliding_window
        return AttentionOptions(bias=config.attention_bias, qk_norm=True, sliding_window=window)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        return make_qwen_mlp(config, index, prefix)
