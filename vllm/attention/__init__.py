"""Attention under the names of earlier upstream releases, which third-party connectors import."""

from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata

__all__ = ["Attention", "AttentionBackend", "AttentionMetadata"]
