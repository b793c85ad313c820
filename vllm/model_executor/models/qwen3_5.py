"""Qwen3.5, dense: GatedDeltaNet layers with gated attention every few layers.

Every norm but the one inside GatedDeltaNet is zero-centred. Text only: the weights of a vision
tower or a multi-token-prediction head are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.mamba.gdn import GatedDeltaNet
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM, HybridForCausalLM
from vllm.model_executor.models.utils import StackedParams, require_option


def make_gated_delta_net(
    config: Any, prefix: str, norm_epsilon: float, *, beta_scale: float = 1.0
) -> GatedDeltaNet:
    """Make the recurrent layer from a Qwen3.5 config; norm_epsilon: for the norm inside."""
    require_option(config, hidden_act="silu")  # for the convolution and the gate
    return GatedDeltaNet(
        hidden_size=config.hidden_size,
        num_k_heads=config.linear_num_key_heads,
        num_v_heads=config.linear_num_value_heads,
        head_k_dim=config.linear_key_head_dim,
        head_v_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        rms_norm_eps=norm_epsilon,
        beta_scale=beta_scale,
        prefix=prefix,
    )


class Qwen3_5ForCausalLM(HybridForCausalLM):  # noqa: N801
    """Qwen3.5, dense, a text-only checkpoint: gated delta net and gated attention."""

    recurrent_name = "linear_attn"
    norm_class = GemmaRMSNorm
    stacked_params: ClassVar[StackedParams] = {
        **DecoderForCausalLM.stacked_params,
        "in_proj_qkvzba": {
            "in_proj_qkv": (0, 1, 2),
            "in_proj_z": 3,
            "in_proj_b": 4,
            "in_proj_a": 5,
        },
    }
    module_names: ClassVar[Mapping[str, str]] = {"model.language_model.": "model."}
    """Names in a checkpoint cut out of the whole model. transformers renames them, too."""
    skipped_weights: ClassVar[tuple[str, ...]] = (
        "mtp.",
        "model.visual.",
        "model.language_model.visual.",
    )

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        """Return the options of attention whose heads are multiplied by a sigmoid gate."""
        return AttentionOptions(bias=config.attention_bias, qk_norm=True, gates_output=True)

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        return make_gated_delta_net(config, prefix, config.rms_norm_eps)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):  # noqa: N801
    """Qwen3.5, dense, as published: the text model; vision and MTP weights are skipped."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"model.": "model.language_model."}
    module_names: ClassVar[Mapping[str, str]] = {}
