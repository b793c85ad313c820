"""Hunyuan 1, dense and with experts: Llama that norms queries and keys after their rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, RoutingRule
from vllm.model_executor.models.decoder_block import AttentionOptions, GatedMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def of_layer(value: Any, index: int) -> Any:
    """A number of the config that may be a list, one for each layer."""
    return value[index] if isinstance(value, (list, tuple)) else value


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    """Hunyuan 0.5B to 7B, dense."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "self_attn.q_norm": "self_attn.query_layernorm",
        "self_attn.k_norm": "self_attn.key_layernorm",
        "mlp.router.gate": "mlp.gate.wg",
        "mlp.shared_expert": "mlp.shared_mlp",
    }

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        """The MLP of the layer at ``index``."""
        sizes = (config.hidden_size, config.intermediate_size)
        return GatedMLP(*sizes, config.hidden_act, prefix=prefix)

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
            normalises_rotated=True,
        )
        mlp = self.make_mlp(config, index, f"{prefix}.mlp")
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp)


class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM):
    """Hunyuan-A13B: a mixture in every layer, and an MLP for all tokens."""

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        experts = Experts(
            of_layer(config.num_experts, index),
            config.hidden_size,
            config.intermediate_size,
            activation=get_act_and_mul_fn(config.hidden_act),
            prefix=f"{prefix}.experts",
        )
        rule = RoutingRule(
            top_k=of_layer(config.moe_topk, index), top_k_option="moe_topk", renormalise=True
        )
        shared = super().make_mlp(config, index, f"{prefix}.shared_expert")
        return FusedMoE(config.hidden_size, experts, rule, shared_expert=shared, prefix=prefix)
