"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a window in some layers."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.decoder_block import AttentionOptions
from vllm.model_executor.models.decoder_model import DecoderForCausalLM


def layer_sliding_window(config: Any, index: int) -> int | None:
    """Return the window of layer ``index`` of a Qwen2 or Qwen3 config; None: full attention.

    The config fills ``layer_types`` from ``use_sliding_window`` and ``max_window_layers``.
    """
    kind = config.layer_types[index]
    if kind == "full_attention":
        return None
    if kind == "sliding_attention" and config.sliding_window is not None:
        window: int = config.sliding_window
        return window
    raise ValueError(
        f"layer_types[{index}]={kind!r} with sliding_window={config.sliding_window}: supported "
        f"are 'full_attention', and 'sliding_attention' if use_sliding_window is true and "
        f"sliding_window is a number"
    )


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2 and Qwen2.5, dense; a sliding window in the upper layers if the config enables it."""

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        window = layer_sliding_window(config, index)
        return AttentionOptions(qkv_bias=True, sliding_window=window)
