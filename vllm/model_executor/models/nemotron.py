"""Nemotron, dense: layer norms with weights stored minus one, squared ReLU, no gate."""

from __future__ import annotations

import torch

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM


class NemotronForCausalLM(DecoderForCausalLM):
    """Nemotron-4 and Minitron, dense."""

    norm_class = LayerNorm
    norm_epsilon = "norm_eps"
    mlp_class = PlainMLP
    mlp_bias = "mlp_bias"

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 1.0 if name.endswith("norm.weight") else tensor
