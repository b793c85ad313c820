"""Mamba and Falcon-Mamba: only Mamba mixers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import nn

from vllm.model_executor.layers.layernorm import Float32StreamRMSNorm, RMSNorm
from vllm.model_executor.layers.mamba.mamba1 import MAMBA_NAMES, MambaMixer
from vllm.model_executor.models.decoder_block import BlockLayout, DecoderBlock, Float32StreamBlock
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.utils import StackedParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class MambaForCausalLM(DecoderForCausalLM):
    """Mamba 130M to 2.8B: only recurrent layers."""

    has_inner_state: ClassVar[Literal[True]] = True
    supported_options: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    stacked_params: ClassVar[StackedParams] = {}
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"model.": "backbone."}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        **MAMBA_NAMES,
        "model.embed_tokens": "model.embeddings",
        "model.norm": "model.norm_f",
        "input_layernorm": "norm",
    }

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        norm_class = Float32StreamRMSNorm if config.residual_in_fp32 else RMSNorm
        return norm_class(size, eps=config.layer_norm_epsilon)

    def published_name(self, name: str) -> str:
        """Rename the embeddings, which older checkpoints call ``backbone.embedding``."""
        return name.replace("backbone.embedding.", "backbone.embeddings.")

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        recurrent = {"mixer": self.make_mixer(config, f"{prefix}.mixer")}
        block: type[DecoderBlock] = DecoderBlock
        norm: Callable[[int], nn.Module] = functools.partial(self.make_norm, config)
        if config.residual_in_fp32:
            block = Float32StreamBlock
            norm = functools.partial(
                Float32StreamRMSNorm, eps=config.layer_norm_epsilon, rounds_first=True
            )
        layout = BlockLayout(norm=norm)
        return block(config.hidden_size, None, None, layout, recurrent=recurrent)

    def make_mixer(self, config: Any, prefix: str) -> nn.Module:
        """Make the recurrent layer that the config describes."""
        return MambaMixer(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            state_size=config.state_size,
            step_rank=config.time_step_rank,
            conv_width=config.conv_kernel,
            conv_option="conv_kernel",
            conv_bias=config.use_conv_bias,
            bias=config.use_bias,
            norm=self.mixer_norm(config),
            prefix=prefix,
        )

    def mixer_norm(self, config: Any) -> Callable[[int], nn.Module] | None:
        """Return the function that makes norms inside a mixer; None: it has none."""
        return None


class FalconMambaForCausalLM(MambaForCausalLM):
    """Falcon-Mamba 7B: Mamba with norms inside the mixer."""

    def mixer_norm(self, config: Any) -> Callable[[int], nn.Module] | None:
        return functools.partial(RMSNorm, eps=config.mixer_rms_eps, has_weight=False)
