"""Apertus: Llama with norms of every head and xIELU, whose two numbers each layer has learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.nn import functional

from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.models.decoder_block import AttentionOptions, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import require_option
from vllm.ops.activations import xielu

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class XIELU(Layer):
    """See :func:`vllm.ops.activations.xielu`; the checkpoint has logarithms of its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = _number(1), _number(1)
        self.beta, self.eps = _number(), _number()
        self._numbers: tuple[float, float, float, float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, n] -> [tokens, n]."""
        if self._numbers is None:  # once, for reading them waits for the device
            positive, negative = (
                float(functional.softplus(alpha.float())) for alpha in (self.alpha_p, self.alpha_n)
            )
            beta = float(self.beta)
            self._numbers = positive, beta + negative, beta, float(self.eps)
        out = torch.empty_like(x)
        xielu(x, *self._numbers, out)
        return out


def _number(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


class ApertusForCausalLM(DecoderForCausalLM):
    """Apertus 8B and 70B."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        require_option(config, hidden_act="xielu")
        options = AttentionOptions(
            qkv_bias=config.attention_bias, output_bias=config.attention_bias, qk_norm=True
        )
        sizes = (config.hidden_size, config.intermediate_size)
        mlp = PlainMLP(*sizes, XIELU(), bias=False, prefix=f"{prefix}.mlp")
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp)
