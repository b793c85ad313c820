"""Training on hidden states while an engine extracts them."""

from __future__ import annotations

from vllm.training.activation_buffer import ActivationBuffer
from vllm.training.extracting_dataset import ExtractingDataset

__all__ = ["ActivationBuffer", "ExtractingDataset"]
