"""Choosing tokens by their logits."""

from __future__ import annotations

import torch

from vllm.ops.operation import KERNEL_DTYPES, Written, operation


@operation
def most_likely(logits: torch.Tensor, out: Written) -> None:
    """Index of the largest logit of each row, or of its first NaN; the first one if several tie.

    logits: [rows, vocabulary]; out: int64 [rows].
    """
    out.copy_(logits.argmax(dim=-1))


@most_likely.contract
def _(logits: torch.Tensor, out: torch.Tensor) -> None:
    assert logits.dim() == 2 and logits.stride(1) == 1 and logits.shape[1] > 0
    assert logits.dtype in KERNEL_DTYPES
    assert out.dtype is torch.int64 and out.shape == logits.shape[:1] and out.is_contiguous()
