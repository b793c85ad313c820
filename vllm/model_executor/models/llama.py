"""Llama, and families that differ from it only in the options of their attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.decoder_block import (
    AttentionOptions,
    BlockLayout,
    DecoderBlock,
    GatedMLP,
    SelfAttention,
)
from vllm.model_executor.models.decoder_model import DecoderForCausalLM

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class LlamaDecoderLayer(DecoderBlock):
    """A block made from a config, for third-party models that make their own layers.

    mlp: replaces the one that the config describes. layout: the positions of norms; None: before
    attention and MLP.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        options: AttentionOptions,
        prefix: str,
        *,
        mlp_bias: bool = False,
        mlp: nn.Module | None = None,
        layout: BlockLayout | None = None,
    ) -> None:
        config = vllm_config.model_config.hf_text_config
        layout = layout or BlockLayout(norm=lambda size: RMSNorm(size, eps=config.rms_norm_eps))
        attention = SelfAttention(vllm_config, options, layout.norm, f"{prefix}.self_attn")
        if mlp is None:
            mlp = GatedMLP(
                config.hidden_size,
                config.intermediate_size,
                config.hidden_act,
                bias=mlp_bias,
                prefix=f"{prefix}.mlp",
            )
        super().__init__(config.hidden_size, attention, mlp, layout)


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 1, 2, 3, 3.1, 3.2 (text), and many families that share the class."""

    mlp_bias = "mlp_bias"


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral 7B and similar models: a sliding window in every layer, or in none."""

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(sliding_window=config.sliding_window)
