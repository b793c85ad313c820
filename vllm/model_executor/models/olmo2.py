"""OLMo 2 and 3: norms after attention and MLP, not before, and over whole queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from vllm.model_executor.layers.layernorm import RMSNorm, WideRMSNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.qwen2 import layer_sliding_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Olmo2ForCausalLM(DecoderForCausalLM):
    """OLMo 2."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    def window(self, config: Any, index: int) -> int | None:
        """The sliding window of the layer at ``index``."""
        return None

    def rope_parameters(self, config: Any, index: int) -> Mapping[str, Any]:
        """The rotation of the layer at ``index``."""
        parameters: Mapping[str, Any] = config.rope_parameters
        return parameters

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=lambda heads, size: WideRMSNorm(heads * size, eps=config.rms_norm_eps),
            rope_parameters=self.rope_parameters(config, index),
            sliding_window=self.window(config, index),
        )
        layout = BlockLayout(
            norm=lambda size: RMSNorm(size, eps=config.rms_norm_eps),
            norms_before=False,
            norms_after=True,
        )
        return LlamaDecoderLayer(vllm_config, options, prefix, layout=layout)


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3: windows in most layers, whose rotation is another one."""

    def window(self, config: Any, index: int) -> int | None:
        return layer_sliding_window(config, index)

    def rope_parameters(self, config: Any, index: int) -> Mapping[str, Any]:
        by_kind = config.rope_parameters
        parameters: Mapping[str, Any] = by_kind.get(config.layer_types[index], by_kind)
        return parameters
