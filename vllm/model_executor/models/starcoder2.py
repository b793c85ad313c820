"""StarCoder2: Llama with layer norms, biases, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM


class Starcoder2ForCausalLM(DecoderForCausalLM):
    """StarCoder2 3B, 7B and 15B."""

    norm_class = LayerNorm
    norm_epsilon = "norm_epsilon"
    mlp_class = PlainMLP
    mlp_bias = "use_bias"
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(bias=config.use_bias, sliding_window=config.sliding_window)
