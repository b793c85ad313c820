"""GPT-OSS: attention with sinks and a window in every other layer, experts with clamped gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.activation import SwigluOAIAndMul
from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.mixture import make_moe, outputs_first
from vllm.model_executor.models.qwen2 import layer_sliding_window
from vllm.model_executor.utils import check_shape
from vllm.ops.packed_linear import PackedExperts


class GptOssForCausalLM(DecoderForCausalLM):
    """gpt-oss-20b and 120b; experts in MXFP4, or in 16 or 32 bits."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "mlp.router.gate": "mlp.router",
        "self_attn.attn.sinks": "self_attn.sinks",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        window = layer_sliding_window(config, index)
        return AttentionOptions(bias=config.attention_bias, sliding_window=window, has_sinks=True)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        return make_moe(
            config,
            RoutingRule(top_k=config.num_experts_per_tok, renormalise=True),
            config.num_local_experts,
            config.intermediate_size,
            prefix,
            activation=SwigluOAIAndMul(config.swiglu_alpha, config.swiglu_limit),
            bias=True,
            router_bias=True,
        )

    def convert_weight(self, name: str, tensor: Any) -> Any:
        """Reorder experts' weights [experts, inputs, outputs], whose outputs alternate gate and up.

        Packed weights have the outputs first.
        """
        if isinstance(tensor, PackedExperts):
            return self._convert_packed(name, tensor)
        config = self.config
        experts, width = config.num_local_experts, config.intermediate_size
        tensor = outputs_first(name, tensor, experts, config.hidden_size, width)
        if name.endswith("experts.gate_up_proj_bias"):
            check_shape(tensor, (experts, 2 * width))
        elif not name.endswith("experts.gate_up_proj"):
            return tensor
        return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), dim=1)

    def _convert_packed(self, name: str, packed: PackedExperts) -> PackedExperts:
        config = self.config
        hidden, width = config.hidden_size, config.intermediate_size
        if not name.endswith("experts.gate_up_proj"):
            return packed
        check_shape(packed, (config.num_local_experts, 2 * width, hidden))
        gates, ups = slice(0, None, 2), slice(1, None, 2)
        return replace(
            packed,
            weights=tuple(w.select_rows(gates).above(w.select_rows(ups)) for w in packed.weights),
        )
