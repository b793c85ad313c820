"""Attention layers."""

from __future__ import annotations

from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import LatentExpansion, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

__all__ = ["Attention", "AttentionLayerBase", "LatentExpansion", "MLAAttention"]
