"""GPT-1: learned positions, and layer norms over the stream itself after each branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.hook_points import BlockHook
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import (
    AttentionOptions,
    BlockLayout,
    DecoderBlock,
    PlainMLP,
)
from vllm.model_executor.models.decoder_loop import Stream
from vllm.model_executor.models.gpt2 import GPT2LMHeadModel

_ACTIVATIONS = {"gelu": "gelu_new", "swish": "silu"}
"""GPT-1's name of an activation -> this engine's."""


class NormedStreamBlock(DecoderBlock):
    """A block that adds each branch to the stream and norms the sum, also its output."""

    def middle_of_stream(self) -> BlockHook:
        assert self.input_layernorm is not None
        return BlockHook(("hook_resid_mid",), self.input_layernorm, self.stream_size, is_share=True)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> Stream:
        """Return the stream, [tokens, hidden], after this layer."""
        assert residual is None
        assert self.input_layernorm is not None and self.post_attention_layernorm is not None
        mixed = self.run_mixers(positions, hidden_states)
        x, _ = self.input_layernorm(mixed, hidden_states)
        stream, _ = self.post_attention_layernorm(self.run_mlp(x, x), x)
        return stream, None


class OpenAIGPTLMHeadModel(GPT2LMHeadModel):
    """GPT-1, the model of 2018 with 117M parameters."""

    supported_options: ClassVar[Mapping[str, Any]] = {}
    block_class = NormedStreamBlock
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "transformer.tokens_embed",
        "model.learned_positions": "transformer.positions_embed",
        "model.layers": "transformer.h",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "self_attn.qkv_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        heads = config.num_attention_heads
        return AttentionOptions(bias=True, num_kv_heads=heads, rotates=False)

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        return BlockLayout(norm=lambda size: LayerNorm(size, eps=config.layer_norm_epsilon))

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        hidden, activation = config.hidden_size, _ACTIVATIONS.get(config.afn, config.afn)
        return PlainMLP(hidden, 4 * hidden, activation, option="afn", prefix=prefix)

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return nn.Identity()  # the last layer norms its stream
