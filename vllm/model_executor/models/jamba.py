"""Jamba: Mamba with attention every few layers, and experts in some of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.layers.fused_moe import RoutingRule
from vllm.model_executor.layers.mamba.mamba1 import MAMBA_NAMES, MambaMixer
from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import HybridForCausalLM
from vllm.model_executor.models.mixture import make_moe
from vllm.model_executor.models.utils import require_option


class JambaForCausalLM(HybridForCausalLM):
    """Jamba 1 to 1.7, Mini and Large: Mamba, attention without positions, experts."""

    recurrent_name = "mamba"
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        **MAMBA_NAMES,
        "post_attention_layernorm": "pre_ff_layernorm",
        "mlp": "feed_forward",
        "mlp.router.gate": "feed_forward.router",
        "model.norm": "model.final_layernorm",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(rotates=False)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        """Make a dense MLP, or a mixture whose softmax weights are not renormalised."""
        experts = config.layers_num_experts[index]
        if experts == 1:
            return self.dense_mlp(config, prefix)
        rule = RoutingRule(top_k=config.num_experts_per_tok)
        return make_moe(config, rule, experts, config.intermediate_size, prefix)

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        require_option(config, hidden_act="silu")  # for the convolution
        return MambaMixer(
            hidden_size=config.hidden_size,
            intermediate_size=config.mamba_expand * config.hidden_size,
            state_size=config.mamba_d_state,
            step_rank=config.mamba_dt_rank,
            conv_width=config.mamba_d_conv,
            conv_option="mamba_d_conv",
            conv_bias=config.mamba_conv_bias,
            bias=config.mamba_proj_bias,
            norm=partial(self.make_norm, config),
            prefix=prefix,
        )
