"""Logits from the last hidden states."""

from __future__ import annotations

import torch

from vllm.distributed.parallel_state import tensor_model_parallel_all_gather
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


class LogitsProcessor(Layer):
    """Applies the LM head, then the model's scaling and capping of logits."""

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        *,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.org_vocab_size = org_vocab_size or vocab_size
        # What is no number fails here, where the error can name it.
        self.scale = 1.0 * scale
        self.soft_cap = None if soft_cap is None else 1.0 * soft_cap

    def forward(self, lm_head: ParallelLMHead, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [rows, hidden] -> logits [rows, vocabulary] in the same dtype."""
        logits = tensor_model_parallel_all_gather(lm_head.multiply(hidden_states))
        logits = logits[:, : self.org_vocab_size]
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits if self.scale == 1.0 else logits * self.scale
