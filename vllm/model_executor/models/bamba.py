"""Bamba and Granite 4: Mamba-2 or attention, then an MLP or experts, in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.layers.mamba.mamba2 import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import HybridForCausalLM
from vllm.model_executor.models.granite import GraniteMoeSharedForCausalLM
from vllm.model_executor.models.utils import require_option


def make_bamba_mixer(config: Any, prefix: str) -> Mamba2Mixer:
    """Make the recurrent layer from a Bamba config."""
    require_option(config, hidden_act="silu")
    return Mamba2Mixer(
        config.hidden_size,
        Mamba2Sizes.read(config),
        norm_eps=config.rms_norm_eps,
        input_bias=config.mamba_proj_bias,
        output_bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
        dt_limits=config.time_step_limit,
        prefix=prefix,
    )


class BambaForCausalLM(HybridForCausalLM):
    """Bamba 9B: Mamba-2, attention every few layers, an MLP in each."""

    recurrent_name = "mamba"
    layer_kinds_option = "layers_block_type"
    mlp_bias = "mlp_bias"
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.norm": "model.final_layernorm",
        "post_attention_layernorm": "pre_ff_layernorm",
        "mlp": "feed_forward",
    }

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        return make_bamba_mixer(config, prefix)


class GraniteMoeHybridForCausalLM(HybridForCausalLM, GraniteMoeSharedForCausalLM):
    """Granite 4: Mamba-2, attention every few layers, an MLP or experts in each."""

    recurrent_name = "mamba"
    mlp_bias = False

    def names_in_checkpoint(self) -> Mapping[str, str]:
        if self.config.num_local_experts:
            return self.checkpoint_names
        return {
            "mlp.gate_up_proj": "shared_mlp.input_linear",
            "mlp.down_proj": "shared_mlp.output_linear",
        }

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        return make_bamba_mixer(config, prefix)

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        rotates = config.position_embedding_type == "rope"
        return replace(super().attention_options(config, index), rotates=rotates)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        if config.num_local_experts:
            return super().make_mlp(config, index, prefix)
        return self.dense_mlp(config, prefix, config.shared_intermediate_size)
