"""Arcee (AFM): Llama with squared ReLU and no gate."""

from __future__ import annotations

from vllm.model_executor.models.decoder_block import PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM


class ArceeForCausalLM(DecoderForCausalLM):
    """Arcee AFM-4.5B."""

    mlp_class = PlainMLP
    mlp_bias = "mlp_bias"
