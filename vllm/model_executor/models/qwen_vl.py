"""The language models in published checkpoints of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE.

The three positions of a text token are equal, so their rotation is the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.mixture import outputs_first
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen2_moe import QWEN_MOE_NAMES, make_qwen_mlp


class Qwen2VLForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2-VL: the text model; the vision tower is skipped."""

    skipped_weights: ClassVar[tuple[str, ...]] = ("visual.",)


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):  # noqa: N801
    """Qwen2.5-VL: the text model; the vision tower is skipped."""


class Qwen3VLForConditionalGeneration(DecoderForCausalLM):
    """Qwen3-VL, dense: the text model; the vision tower is skipped."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"model.": "model.language_model."}
    skipped_weights: ClassVar[tuple[str, ...]] = ("model.visual.",)

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(bias=config.attention_bias, qk_norm=True)


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """Qwen3-VL with experts: the text model; the vision tower is skipped."""

    checkpoint_names: ClassVar[Mapping[str, str]] = QWEN_MOE_NAMES

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        return make_qwen_mlp(config, index, prefix, renormalise=True)

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Transpose experts' weights that published checkpoints have [experts, inputs, outputs]."""
        config = self.config
        width, hidden = config.moe_intermediate_size, config.hidden_size
        if tensor.shape[1:] in ((2 * width, hidden), (hidden, width)):
            return tensor
        return outputs_first(name, tensor, config.num_experts, hidden, width)
