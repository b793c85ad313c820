"""Apertus: Llama with norms of every head and xIELU, whose two parameters each layer learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.decoder_block import AttentionOptions, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.utils import make_parameter
from vllm.ops.activations import xielu


class XIELU(Layer):
    """See :func:`vllm.ops.activations.xielu`; the checkpoint's alphas are inputs of softplus."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = (make_parameter(torch.zeros(1), self._load) for _ in "pn")
        self.beta, self.eps = (make_parameter(torch.zeros(()), self._load) for _ in range(2))
        self._numbers: tuple[float, float, float, float] | None = None

    def _load(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        default_weight_loader(param, loaded_weight)
        self._numbers = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, n] -> [tokens, n]."""
        if self._numbers is None:  # once for given weights: reading them waits for the device
            positive, negative = (
                float(functional.softplus(alpha.float())) for alpha in (self.alpha_p, self.alpha_n)
            )
            beta = float(self.beta)
            self._numbers = positive, beta + negative, beta, float(self.eps)
        out = torch.empty_like(x)
        xielu(x, *self._numbers, out)
        return out


class ApertusForCausalLM(DecoderForCausalLM):
    """Apertus 8B and 70B."""

    supported_options: ClassVar[Mapping[str, Any]] = {"hidden_act": "xielu"}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(bias=config.attention_bias, qk_norm=True)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        sizes = (config.hidden_size, config.intermediate_size)
        return PlainMLP(*sizes, XIELU(), bias=False, prefix=prefix)
