"""Products through cuBLAS."""

from __future__ import annotations

import torch

from vllm.ops import linear


@linear.linear.override("cuda")
def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
