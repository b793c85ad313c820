"""Mamba-2: only recurrent layers, with norms between them."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllm.model_executor.layers.mamba.mamba2 import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.models.mamba import MambaForCausalLM


class Mamba2ForCausalLM(MambaForCausalLM):
    """Mamba-2 130M to 2.7B, Codestral Mamba 7B: only recurrent layers."""

    def make_mixer(self, config: Any, prefix: str) -> nn.Module:
        sizes = Mamba2Sizes.read(
            config,
            num_heads="num_heads",
            head_dim="head_dim",
            num_groups="n_groups",
            state_size="state_size",
            conv_width="conv_kernel",
        )
        return Mamba2Mixer(
            config.hidden_size,
            sizes,
            norm_eps=config.layer_norm_epsilon,
            input_bias=config.use_bias,
            output_bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            dt_limits=config.time_step_limit,
            prefix=prefix,
        )
