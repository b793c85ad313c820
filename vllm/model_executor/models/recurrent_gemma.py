"""RecurrentGemma: gated linear recurrences, attention in a window every few layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.rg_lru import RecurrentBlock
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM, HybridForCausalLM
from vllm.model_executor.models.utils import StackedParams


class RecurrentGemmaForCausalLM(HybridForCausalLM):
    """RecurrentGemma 2B and 9B (Griffin): gated linear recurrences, and attention in a window."""

    recurrent_name = "recurrent"
    layer_kinds = ("linear_attention", "sliding_attention")
    norm_class = GemmaRMSNorm
    mlp_activation = "hidden_activation"
    mlp_bias = True
    scales_given_embeddings: ClassVar[bool] = True
    stacked_params: ClassVar[StackedParams] = {
        **DecoderForCausalLM.stacked_params,
        "in_proj": {"linear_y": 0, "linear_x": 1},
    }
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "temporal_pre_norm",
        "post_attention_layernorm": "channel_pre_norm",
        "mlp": "mlp_block",
        "self_attn": "temporal_block",
        "recurrent": "temporal_block",
        "recurrent.out_proj": "temporal_block.linear_out",
        "model.norm": "model.final_norm",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=True,
            sliding_window=config.attention_window_size,
        )

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        """Make the MLP with half the config's width, which counts gate and up projection."""
        return self.dense_mlp(config, prefix, config.intermediate_size // 2)

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        return RecurrentBlock(
            hidden_size=config.hidden_size,
            width=config.lru_width,
            num_heads=config.num_attention_heads,
            conv_width=config.conv1d_width,
            conv_option="conv1d_width",
            activation=config.hidden_activation,
            activation_option="hidden_activation",
            prefix=prefix,
        )

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        """Return the root of the hidden size, rounded to bfloat16 for any dtype of the weights."""
        return float(torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16))

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, soft_cap=config.logits_soft_cap)
