"""MiniCPM3: latent attention, and multipliers of embeddings, branches and logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.decoder_block import BlockLayout
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

    mlp_bias = "mlp_bias"

    def names_in_checkpoint(self) -> Mapping[str, str]:
        return latent_names(self.config)

    def make_attention(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        return LatentSelfAttention(vllm_config, LatentOptions(interleaved=False), prefix)

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        multiplier = config.scale_depth / math.sqrt(config.num_hidden_layers)
        return replace(super().block_layout(config, index), residual_multiplier=multiplier)

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        return torch.tensor(float(config.scale_emb), dtype=dtype).item()

    def head_input(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = hidden_states / (
            self.config.hidden_size / self.config.dim_model_base
        )
        return scaled

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, scale=config.dim_model_base / config.hidden_size)
