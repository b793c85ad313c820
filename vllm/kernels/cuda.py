"""The kernels of an NVIDIA GPU: Triton where it pays, torch and cuBLAS elsewhere.

Nothing here waits for the device. Bits of a row do not depend on the batch, except that

* cuBLAS chooses the algorithm of :meth:`CudaKernels.linear` by the number of rows;
* the recurrent layers are the same for all cuts at multiples of 64 tokens only
  (``triton_recurrent``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.nn import functional

from vllm.kernels import device_rows, triton_elementwise
from vllm.kernels.base import PendingReport
from vllm.kernels.plain import PlainKernels
from vllm.kernels.triton_attention import attention_scratch_bytes, paged_attention
from vllm.kernels.triton_recurrent import causal_conv1d, gated_delta_rule


class CudaKernels(PlainKernels):
    """Implements :class:`vllm.kernels.base.Kernels` for CUDA tensors.

    What is not replaced torch does as well.
    """

    name = "cuda"
    silu_and_mul = staticmethod(triton_elementwise.silu_and_mul)
    sigmoid_gate = staticmethod(triton_elementwise.sigmoid_gate)
    rotary_embedding = staticmethod(triton_elementwise.rotary_embedding)
    write_kv = staticmethod(triton_elementwise.write_kv)
    capture_rows = staticmethod(triton_elementwise.capture_rows)
    copy_blocks = staticmethod(triton_elementwise.copy_blocks)
    paged_attention = staticmethod(paged_attention)
    causal_conv1d = staticmethod(causal_conv1d)
    gated_delta_rule = staticmethod(gated_delta_rule)

    inspect_rows = staticmethod(device_rows.inspect_rows)
    leaving_rows_bytes = staticmethod(device_rows.leaving_rows_bytes)
    attention_scratch_bytes = staticmethod(attention_scratch_bytes)

    def __init__(self) -> None:
        self._transfer = device_rows.RowTransfer()
        # Sums of 16-bit products stay in float32, also where cuBLAS splits them.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        return triton_elementwise.rms_norm(x, weight, eps, offset)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
    ) -> torch.Tensor:
        return triton_elementwise.rms_norm(x, weight, eps, offset, residual=residual)

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return triton_elementwise.rms_norm(x, weight, eps, gate=gate)

    def gather_rows(
        self, row_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> PendingReport:
        return self._transfer.gather_rows(row_cache, slots, out)

    def beside(self, rows: torch.Tensor) -> AbstractContextManager[None]:
        return self._transfer.beside(rows)
