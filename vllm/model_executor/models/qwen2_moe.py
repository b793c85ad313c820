"""Qwen2-MoE: Qwen2 with a mixture of experts in most layers, one of them for all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.layers.fused_moe import FusedMoE, RoutingRule
from vllm.model_executor.models.decoder_block import AttentionOptions, GatedMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.mixture import make_moe
from vllm.model_executor.models.qwen2 import layer_sliding_window

QWEN_MOE_NAMES: Mapping[str, str] = {"mlp.router.gate": "mlp.gate"}


def make_qwen_mlp(
    config: Any,
    index: int,
    prefix: str,
    *,
    shared_width: int = 0,
    renormalise: bool | None = None,
) -> nn.Module:
    """Make the MLP of layer ``index``: dense or a mixture (:func:`make_qwen_moe`).

    renormalise: None: the config's ``norm_topk_prob``.
    """
    if index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0:
        if renormalise is None:
            renormalise = config.norm_topk_prob
        return make_qwen_moe(config, prefix, renormalise=renormalise, shared_width=shared_width)
    sizes = (config.hidden_size, config.intermediate_size)
    return GatedMLP(*sizes, config.hidden_act, prefix=prefix)


def make_qwen_moe(
    config: Any, prefix: str, *, renormalise: bool, shared_width: int = 0
) -> FusedMoE:
    """Make a mixture with softmax scores; shared_width: of a gated expert for all tokens."""
    return make_moe(
        config,
        RoutingRule(top_k=config.num_experts_per_tok, renormalise=renormalise),
        config.num_experts,
        config.moe_intermediate_size,
        prefix,
        shared_width=shared_width,
        gates_shared_expert=shared_width > 0,
    )


class Qwen2MoeForCausalLM(DecoderForCausalLM):
    """Qwen1.5-MoE and Qwen2-57B-A14B."""

    checkpoint_names: ClassVar[Mapping[str, str]] = QWEN_MOE_NAMES

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        window = layer_sliding_window(config, index)
        return AttentionOptions(qkv_bias=config.qkv_bias, sliding_window=window)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        shared_width = config.shared_expert_intermediate_size
        return make_qwen_mlp(config, index, prefix, shared_width=shared_width)
