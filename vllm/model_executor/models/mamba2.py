"""Mamba-2: recurrent layers alone, nothing between them but norms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from vllm.model_executor.layers.layernorm import Float32StreamRMSNorm, RMSNorm
from vllm.model_executor.layers.mamba.mamba2 import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.models.decoder_block import BlockLayout, DecoderBlock, Float32StreamBlock
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.utils import StackedParams, require_option
from vllm.ops.packed_linear import PackedWeight

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Mamba2ForCausalLM(DecoderForCausalLM):
    """Mamba-2 130M to 2.7B, Codestral Mamba 7B: recurrent layers alone."""

    has_inner_state: ClassVar[Literal[True]] = True
    stacked_params: ClassVar[StackedParams] = {}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model": "backbone",
        "model.embed_tokens": "backbone.embeddings",
        "model.norm": "backbone.norm_f",
        "input_layernorm": "norm",
    }

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        norm_class = Float32StreamRMSNorm if config.residual_in_fp32 else RMSNorm
        return norm_class(size, eps=config.layer_norm_epsilon)

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        require_option(config, hidden_act="silu")
        sizes = Mamba2Sizes.read(
            config,
            num_heads="num_heads",
            head_dim="head_dim",
            num_groups="n_groups",
            state_size="state_size",
            conv_width="conv_kernel",
        )
        mixer = Mamba2Mixer(
            config.hidden_size,
            sizes,
            norm_eps=config.layer_norm_epsilon,
            input_bias=config.use_bias,
            output_bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            dt_limits=config.time_step_limit,
            prefix=f"{prefix}.mixer",
        )
        block: type[DecoderBlock] = DecoderBlock
        norm: Callable[[int], nn.Module] = functools.partial(self.make_norm, config)
        if config.residual_in_fp32:
            block = Float32StreamBlock
            norm = functools.partial(
                Float32StreamRMSNorm, eps=config.layer_norm_epsilon, rounds_first=True
            )
        layout = BlockLayout(norm=norm)
        return block(config.hidden_size, None, None, layout, recurrent={"mixer": mixer})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | PackedWeight]]) -> set[str]:
        """Older checkpoints call the embeddings ``backbone.embedding``."""
        old, new = "backbone.embedding.", "backbone.embeddings."
        renamed = ((name.replace(old, new), weight) for name, weight in weights)
        return super().load_weights(renamed)
