"""What a backend is, and what its layers read in a step."""

from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata

__all__ = ["AttentionBackend", "AttentionMetadata"]
