"""Llama 4, text: attention inside of chunks, layers without rotation, experts.

Three layers in four rotate and attend from the start of a query's chunk of ``attention_chunk_size``
tokens; the fourth reads everything, does not rotate, and sharpens its scores the further it is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, RoutingRule
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader.weight_utils import check_shape
from vllm.model_executor.models.decoder_block import AttentionOptions, GatedMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import layer_kind

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class Llama4ForCausalLM(DecoderForCausalLM):
    """Llama 4, text, as a checkpoint of its own: experts, attention inside of chunks."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "mlp": "feed_forward",
        "mlp.router.gate": "feed_forward.router",
        "mlp.experts": "feed_forward.experts",
        "mlp.shared_expert": "feed_forward.shared_expert",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        if index in config.moe_layers:
            mlp: nn.Module = make_llama4_moe(config, f"{prefix}.mlp")
        else:
            sizes = (config.hidden_size, config.intermediate_size_mlp)
            mlp = GatedMLP(*sizes, config.hidden_act, prefix=f"{prefix}.mlp")
        return LlamaDecoderLayer(vllm_config, attention_options(config, index), prefix, mlp=mlp)

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Experts' weights that lie as [experts, inputs, outputs]."""
        config = self.config
        experts, hidden = config.num_local_experts, config.hidden_size
        width = config.intermediate_size
        if name.endswith("experts.gate_up_proj"):
            check_shape(tensor, (experts, hidden, 2 * width))
        elif name.endswith("experts.down_proj"):
            check_shape(tensor, (experts, width, hidden))
        else:
            return tensor
        return tensor.transpose(1, 2)


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """Llama 4 Scout and Maverick as published: the text model; the vision tower is skipped."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {
        "model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    }
    skipped_weights: ClassVar[tuple[str, ...]] = ("vision_model.", "multi_modal_projector.")

    @staticmethod
    def ties_head(model_config: ModelConfig) -> bool:
        """The text model has the head inside, so it is ``text_config`` that says."""
        return bool(model_config.hf_text_config.tie_word_embeddings)


def attention_options(config: Any, index: int) -> AttentionOptions:
    """What the attention of the layer at ``index`` does."""
    kind = layer_kind(config, index, ("chunked_attention", "full_attention"))
    rotates = bool(config.no_rope_layers[index])  # which says where it is rotated

    def sharpness(positions: torch.Tensor) -> torch.Tensor:
        floors = torch.floor((positions + 1.0) / config.floor_scale)
        return torch.log1p(floors) * float(config.attn_scale) + 1.0

    def norm_without_weight(heads: int, size: int) -> nn.Module:
        return RMSNorm(size, eps=config.rms_norm_eps, has_weight=False)

    return AttentionOptions(
        qkv_bias=config.attention_bias,
        output_bias=config.attention_bias,
        qk_norm=norm_without_weight if config.use_qk_norm and rotates else False,
        normalises_rotated=True,
        rotates=rotates,
        interleaved=True,
        chunk_size=config.attention_chunk_size if kind == "chunked_attention" else None,
        query_factors=sharpness if config.attn_temperature_tuning and not rotates else None,
    )


def make_llama4_moe(config: Any, prefix: str) -> FusedMoE:
    """A mixture whose experts get inputs times their score, and an MLP for all tokens."""
    sizes = (config.hidden_size, config.intermediate_size)
    experts = Experts(
        config.num_local_experts,
        *sizes,
        activation=get_act_and_mul_fn(config.hidden_act),
        prefix=f"{prefix}.experts",
    )
    return FusedMoE(
        config.hidden_size,
        experts,
        RoutingRule(top_k=config.num_experts_per_tok, scores="sigmoid"),
        shared_expert=GatedMLP(*sizes, config.hidden_act, prefix=f"{prefix}.shared_expert"),
        weighs_input=True,
        prefix=prefix,
    )
