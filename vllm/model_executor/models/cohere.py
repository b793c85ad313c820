"""Command R and Aya (Cohere, Cohere2): attention and MLP side by side behind one layer norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.qwen2 import layer_sliding_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CohereForCausalLM(DecoderForCausalLM):
    """Command R, R+, Aya 23.

    Norms have no bias; those of heads have their own weights each.
    """

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        """What the attention of the layer at ``index`` does."""

        def norm_of_heads(heads: int, size: int) -> nn.Module:
            return LayerNorm(heads, size, eps=config.layer_norm_eps, bias=False)

        return AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=norm_of_heads if config.use_qk_norm else False,
            interleaved=True,
        )

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size), parallel="one norm")
        options = self.attention_options(config, index)
        return LlamaDecoderLayer(vllm_config, options, prefix, layout=layout)

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return LayerNorm(size, eps=config.layer_norm_eps, bias=False)

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, scale=config.logit_scale)


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B and Command A: windows, and no rotation where there is none."""

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        window = layer_sliding_window(config, index)
        return AttentionOptions(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            rotates=window is not None,
            interleaved=True,
            sliding_window=window,
        )
