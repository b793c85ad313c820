"""Qwen3.5-MoE: Qwen3.5 with a mixture of experts in every layer, one of them for all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.models.qwen2_moe import QWEN_MOE_NAMES, make_qwen_moe
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801
    """Qwen3.5-MoE, a text-only checkpoint: experts in every layer."""

    checkpoint_names: ClassVar[Mapping[str, str]] = QWEN_MOE_NAMES

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        shared_width = config.shared_expert_intermediate_size
        return make_qwen_moe(config, prefix, renormalise=True, shared_width=shared_width)


class Qwen3_5MoeForConditionalGeneration(  # noqa: N801
    Qwen3_5MoeForCausalLM, Qwen3_5ForConditionalGeneration
):
    """Qwen3.5-MoE as published: the text model; vision and MTP weights are skipped."""
