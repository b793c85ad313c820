"""Qwen2-MoE: Qwen2 with a mixture of experts in most layers, one of them for all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, RoutingRule
from vllm.model_executor.models.decoder_block import AttentionOptions, GatedMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.qwen2 import layer_sliding_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig

QWEN_MOE_NAMES: Mapping[str, str] = {"mlp.router.gate": "mlp.gate"}


def make_qwen_mlp(
    config: Any,
    index: int,
    prefix: str,
    *,
    shared_size: int = 0,
    renormalise: bool | None = None,
) -> nn.Module:
    """The MLP of layer ``index``: dense or a mixture (:func:`make_qwen_moe`).

    renormalise: None: the config's ``norm_topk_prob``.
    """
    if index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0:
        if renormalise is None:
            renormalise = config.norm_topk_prob
        return make_qwen_moe(config, prefix, renormalise=renormalise, shared_size=shared_size)
    sizes = (config.hidden_size, config.intermediate_size)
    return GatedMLP(*sizes, config.hidden_act, prefix=prefix)


def make_qwen_moe(config: Any, prefix: str, *, renormalise: bool, shared_size: int = 0) -> FusedMoE:
    """A mixture with softmax scores; shared_size: width of a gated expert for all, 0: none."""
    experts = Experts(
        config.num_experts,
        config.hidden_size,
        config.moe_intermediate_size,
        activation=get_act_and_mul_fn(config.hidden_act),
        prefix=f"{prefix}.experts",
    )
    shared = None
    if shared_size:
        sizes = (config.hidden_size, shared_size)
        shared = GatedMLP(*sizes, config.hidden_act, prefix=f"{prefix}.shared_expert")
    return FusedMoE(
        config.hidden_size,
        experts,
        RoutingRule(top_k=config.num_experts_per_tok, renormalise=renormalise),
        shared_expert=shared,
        gates_shared_expert=shared is not None,
        prefix=prefix,
    )


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen1.5-MoE and Qwen2-57B-A14B."""

    checkpoint_names: ClassVar[Mapping[str, str]] = QWEN_MOE_NAMES

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.qkv_bias, sliding_window=layer_sliding_window(config, index)
        )
        shared_size = config.shared_expert_intermediate_size
        mlp = make_qwen_mlp(config, index, f"{prefix}.mlp", shared_size=shared_size)
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp)
