"""Mamba and Falcon-Mamba: nothing but Mamba's mixers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import nn

from vllm.model_executor.layers.layernorm import PlainRMSNorm, RMSNorm
from vllm.model_executor.layers.mamba.mamba1 import MAMBA_NAMES, MambaMixer
from vllm.model_executor.models.decoder_block import BlockLayout, DecoderBlock
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.utils import require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class MambaForCausalLM(DecoderForCausalLM):
    """Mamba 130M to 2.8B; the stream has the model's dtype, also with `residual_in_fp32`."""

    has_inner_state: ClassVar[Literal[True]] = True
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"model.": "backbone."}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        **MAMBA_NAMES,
        "model.embed_tokens": "model.embeddings",
        "model.norm": "model.norm_f",
        "input_layernorm": "norm",
    }

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return RMSNorm(size, eps=config.layer_norm_epsilon)

    def mixer_norm(self, config: Any) -> Callable[[int], nn.Module] | None:
        """What makes the norms inside a mixer."""
        return None

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        require_option(config, hidden_act="silu")
        mixer = MambaMixer(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            state_size=config.state_size,
            step_rank=config.time_step_rank,
            conv_width=config.conv_kernel,
            conv_option="conv_kernel",
            conv_bias=config.use_conv_bias,
            bias=config.use_bias,
            norm=self.mixer_norm(config),
            prefix=f"{prefix}.mixer",
        )
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        return DecoderBlock(config.hidden_size, None, None, layout, recurrent={"mixer": mixer})


class FalconMambaForCausalLM(MambaForCausalLM):
    """Falcon-Mamba 7B: Mamba with norms inside the mixer."""

    def mixer_norm(self, config: Any) -> Callable[[int], nn.Module] | None:
        return lambda size: PlainRMSNorm(config.mixer_rms_eps)
