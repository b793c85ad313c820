"""GLM-4 (0414 and before): pairs of neighbours are rotated; the newer one has norms after, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import StackedParams

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class GlmForCausalLM(DecoderForCausalLM):
    """GLM-4-9B and GLM-Edge, before 0414."""

    stacked_params: ClassVar[StackedParams] = {
        "qkv_proj": DecoderForCausalLM.stacked_params["qkv_proj"]
    }
    norms_after: ClassVar[bool] = False

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(qkv_bias=config.attention_bias, interleaved=True)
        layout = BlockLayout(
            norm=lambda size: RMSNorm(size, eps=config.rms_norm_eps),
            norms_after=self.norms_after,
        )
        return LlamaDecoderLayer(vllm_config, options, prefix, layout=layout)


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414 and GLM-Z1."""

    norms_after: ClassVar[bool] = True
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_self_attn_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    }
