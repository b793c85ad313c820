"""MiniCPM3: latent attention, and multipliers on embeddings, branches and logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.decoder_block import BlockLayout, DecoderBlock, GatedMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.latent_attention import (
    LatentOptions,
    LatentSelfAttention,
    latent_names,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class MiniCPM3ForCausalLM(DecoderForCausalLM):
    """MiniCPM3-4B: latent attention, dense."""

    def names_in_checkpoint(self) -> Mapping[str, str]:
        return latent_names(self.config)

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = LatentOptions(interleaved=False)
        attention = LatentSelfAttention(vllm_config, options, f"{prefix}.self_attn")
        mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=config.mlp_bias,
            prefix=f"{prefix}.mlp",
        )
        layout = BlockLayout(
            norm=lambda size: RMSNorm(size, eps=config.rms_norm_eps),
            residual_multiplier=config.scale_depth / math.sqrt(config.num_hidden_layers),
        )
        return DecoderBlock(config.hidden_size, attention, mlp, layout)

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        return torch.tensor(float(config.scale_emb), dtype=dtype).item()

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, scale=config.dim_model_base / config.hidden_size)
