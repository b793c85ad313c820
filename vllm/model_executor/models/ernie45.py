"""ERNIE 4.5, dense and with experts: Llama that rotates pairs of adjacent elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.mixture import make_moe


class Ernie4_5ForCausalLM(DecoderForCausalLM):  # noqa: N801
    """ERNIE 4.5, text, dense."""

    mlp_bias = "use_bias"

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(bias=config.use_bias, interleaved=True)


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):  # noqa: N801
    """ERNIE 4.5, text, with experts in most layers."""

    supported_options: ClassVar[Mapping[str, Any]] = {"use_bias": False}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "mlp.router.gate": "mlp.gate",
        "mlp.router.correction": "mlp.moe_statics.e_score_correction_bias",
        "mlp.shared_expert": "mlp.shared_experts",
    }
    module_names: ClassVar[Mapping[str, str]] = {".gate.moe_statics.": ".moe_statics."}
    skipped_weights: ClassVar[tuple[str, ...]] = ("model.mtp_",)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        is_sparse = config.moe_layer_start_index <= index <= config.moe_layer_end_index
        if not is_sparse or (index + 1) % config.moe_layer_interval:
            return self.dense_mlp(config, prefix)
        rule = RoutingRule(
            top_k=config.moe_k, top_k_option="moe_k", renormalise=True, has_correction=True
        )
        experts, width = config.moe_num_experts, config.moe_intermediate_size
        shared_width = width * (config.moe_num_shared_experts or 0)
        return make_moe(config, rule, experts, width, prefix, shared_width=shared_width)
