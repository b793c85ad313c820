"""Attention under the names of upstream's earlier releases, which connectors of others import."""

from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata

__all__ = ["Attention", "AttentionBackend", "AttentionMetadata"]
