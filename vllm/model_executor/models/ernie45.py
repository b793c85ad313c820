"""ERNIE 4.5, dense and with experts: Llama that rotates pairs of neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, RoutingRule
from vllm.model_executor.models.decoder_block import AttentionOptions, GatedMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Ernie4_5ForCausalLM(DecoderForCausalLM):  # noqa: N801
    """ERNIE 4.5, text, dense."""

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        """The MLP of the layer at ``index``."""
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            bias=config.use_bias,
            prefix=prefix,
        )

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.use_bias, output_bias=config.use_bias, interleaved=True
        )
        mlp = self.make_mlp(config, index, f"{prefix}.mlp")
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp)


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):  # noqa: N801
    """ERNIE 4.5, text, with experts in most layers."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "mlp.router.gate": "mlp.gate",
        "mlp.router.correction": "mlp.moe_statics.e_score_correction_bias",
        "mlp.shared_expert": "mlp.shared_experts",
    }
    skipped_weights: ClassVar[tuple[str, ...]] = ("model.mtp_",)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        require_option(config, use_bias=False)
        is_sparse = config.moe_layer_start_index <= index <= config.moe_layer_end_index
        if not is_sparse or (index + 1) % config.moe_layer_interval:
            return super().make_mlp(config, index, prefix)
        experts = Experts(
            config.moe_num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            activation=get_act_and_mul_fn(config.hidden_act),
            prefix=f"{prefix}.experts",
        )
        shared = None
        if config.moe_num_shared_experts:
            width = config.moe_intermediate_size * config.moe_num_shared_experts
            sizes = (config.hidden_size, width)
            shared = GatedMLP(*sizes, config.hidden_act, prefix=f"{prefix}.shared_expert")
        rule = RoutingRule(
            top_k=config.moe_k, top_k_option="moe_k", renormalise=True, has_correction=True
        )
        return FusedMoE(config.hidden_size, experts, rule, shared_expert=shared, prefix=prefix)
