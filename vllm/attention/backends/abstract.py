"""Base classes of attention backends and of the metadata that their layers read."""

from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata

__all__ = ["AttentionBackend", "AttentionMetadata"]
