"""OLMo 1: Llama with layer norms that have neither weights nor biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_model import DecoderForCausalLM


class OlmoForCausalLM(DecoderForCausalLM):
    """OLMo 1; no `clip_qkv`."""

    supported_options: ClassVar[Mapping[str, Any]] = {"clip_qkv": None}

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        norm = LayerNorm(size, bias=False)
        ones = norm.weight.data
        del norm.weight
        norm.register_buffer("weight", ones, persistent=False)
        return norm
