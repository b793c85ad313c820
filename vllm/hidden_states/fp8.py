"""Rows in 8 bits: float8 e4m3 values with one float32 scale for each (row, layer).

The largest magnitude of a row becomes the largest that e4m3 has (448), so each value keeps
four significant bits over five decades below it.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_TINY = torch.finfo(torch.float32).tiny


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows`` [rows, layers, hidden] -> values in e4m3 of that shape, scales [rows, layers].

    Works on any device. A row of zeros gets scale 1. A row with a value that is not finite
    gets a scale that is not finite, so that it can be told from the scales alone.
    """
    exact = rows.float()
    largest = exact.abs().amax(dim=-1)  # [rows, layers]
    # The smallest normal number: a subnormal scale would lose bits, or become zero.
    scales = (largest / _LARGEST).clamp(min=_TINY)
    scales = torch.where(largest == 0, torch.ones_like(scales), scales)
    # Clamped: division may round past the largest value, which e4m3 would make NaN.
    return (exact / scales[..., None]).clamp(-_LARGEST, _LARGEST).to(FP8), scales


def dequantize_rows(
    values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[rows, layers, hidden] in ``dtype``; products are made in float32."""
    return values.float().mul_(scales[..., None]).to(dtype)


def quantization_errors(
    rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """float32 [rows, layers]: length of what was lost by the length of the row; 0 for zeros."""
    exact = rows.float()
    lost = dequantize_rows(values, scales) - exact
    length: torch.Tensor = torch.linalg.vector_norm(exact, dim=-1).clamp(min=_TINY)
    errors: torch.Tensor = torch.linalg.vector_norm(lost, dim=-1) / length
    return errors
