"""Command R and Aya (Cohere, Cohere2): attention and MLP side by side after one layer norm."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.weight_share import HeadSlice
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.qwen2 import layer_sliding_window
from vllm.model_executor.utils import set_weight_attrs


def _norm_of_each_head(heads: HeadSlice, size: int, eps: float) -> LayerNorm:
    norm = LayerNorm(heads.count, size, eps=eps, bias=False)
    set_weight_attrs(norm.weight, {"weight_loader": heads.load})
    return norm


class CohereForCausalLM(DecoderForCausalLM):
    """Command R, R+, Aya 23.

    Norms have no bias; each head has a norm with its own weights.
    """

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        norm = partial(_norm_of_each_head, eps=config.layer_norm_eps)
        return AttentionOptions(
            bias=config.attention_bias,
            qk_norm=norm if config.use_qk_norm else False,
            interleaved=True,
        )

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        return replace(super().block_layout(config, index), parallel="one norm")

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return LayerNorm(size, eps=config.layer_norm_eps, bias=False)

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, scale=config.logit_scale)


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B and Command A: windows; layers without a window do not rotate."""

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        window = layer_sliding_window(config, index)
        return AttentionOptions(
            bias=config.attention_bias,
            rotates=window is not None,
            interleaved=True,
            sliding_window=window,
        )
