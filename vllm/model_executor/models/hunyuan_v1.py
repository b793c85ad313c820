"""Hunyuan 1, dense and with experts: Llama that norms queries and keys after their rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.mixture import make_moe


def of_layer(value: Any, index: int) -> Any:
    """Return a layer's value of an option, which may be a list with one value per layer."""
    return value[index] if isinstance(value, (list, tuple)) else value


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    """Hunyuan 0.5B to 7B, dense."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "self_attn.q_norm": "self_attn.query_layernorm",
        "self_attn.k_norm": "self_attn.key_layernorm",
        "mlp.router.gate": "mlp.gate.wg",
        "mlp.shared_expert": "mlp.shared_mlp",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        bias = config.attention_bias
        return AttentionOptions(bias=bias, qk_norm=True, normalises_rotated=True)


class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM):
    """Hunyuan-A13B: a mixture in every layer, and an MLP for all tokens."""

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        top_k, width = of_layer(config.moe_topk, index), config.intermediate_size
        rule = RoutingRule(top_k=top_k, top_k_option="moe_topk", renormalise=True)
        experts = of_layer(config.num_experts, index)
        return make_moe(config, rule, experts, width, prefix, shared_width=width)
