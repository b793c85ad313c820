"""The attention layer."""

from vllm.model_executor.layers.attention import Attention

__all__ = ["Attention"]
