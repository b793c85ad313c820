"""Rows in 8 bits: float8 e4m3 values with one float32 scale for each (row, layer).

The largest magnitude of a row becomes the largest that e4m3 has (448), so each value keeps
four significant bits over five decades below it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from vllm.v1.rows.fields.checks import largest_magnitudes

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_VALUES_AT_ONCE = 1 << 18
DEVICE_VALUES_AT_ONCE = 1 << 24
"""Values that are cast on a device at a time: 64 MiB as float32, and three times as much while
they become fp8."""
_TINY = torch.finfo(torch.float32).tiny


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert ``rows`` [rows, layers, hidden] to e4m3 values and scales [rows, layers].

    Works on any device. A row of zeros gets scale 1. A row with a value that is not finite
    gets a scale that is not finite, so that the scales alone show it.
    """
    largest = largest_magnitudes(rows).float()
    # The smallest normal number: a subnormal scale would lose bits, or become zero.
    scales = (largest / _LARGEST).clamp(min=_TINY)
    scales = torch.where(largest == 0, torch.ones_like(scales), scales)
    # Clamped: division may round past the largest value, which e4m3 would make NaN.
    values = torch.empty_like(rows, dtype=FP8)
    for part in row_parts(rows):
        values[part] = (rows[part] / scales[part][..., None]).clamp_(-_LARGEST, _LARGEST).to(FP8)
    return values, scales


def dequantize_rows(
    values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return rows [rows, layers, hidden] in ``dtype``; products are made in float32."""
    exact = torch.empty(values.shape, dtype=dtype, device=values.device)
    for part in row_parts(values):
        exact[part] = _decode(values[part]).mul_(scales[part][..., None])
    return exact


def quantization_errors(
    rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """float32 [rows, layers]: length of the error divided by that of the row; 0 for zeros."""
    errors = torch.empty_like(scales)
    for part in row_parts(values):
        scaled = rows[part] / scales[part][..., None]  # its squares are within float32
        length = torch.linalg.vector_norm(scaled, dim=-1).clamp(min=_TINY)
        lost = _decode(values[part]).sub_(scaled)
        errors[part] = torch.linalg.vector_norm(lost, dim=-1) / length
    return errors


def row_parts(values: torch.Tensor) -> Iterator[slice]:
    """Yield parts of the rows: small ones on a CPU, elsewhere ``DEVICE_VALUES_AT_ONCE`` values."""
    at_once = _VALUES_AT_ONCE if values.device.type == "cpu" else DEVICE_VALUES_AT_ONCE
    step = rows_at_once(values.shape[1:], at_once)
    for first in range(0, len(values), step):
        yield slice(first, first + step)


def rows_at_once(row_shape: Sequence[int], values_at_once: int = _VALUES_AT_ONCE) -> int:
    """Number of rows to turn into float32 at a time, so that they stay in a cache."""
    return max(1, values_at_once // max(1, math.prod(row_shape)))


def row_norms(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """float32 [rows, layers], lengths; not finite where a row is not (or its square is not)."""
    exact = values if scales is None else _decode(values)
    norms: torch.Tensor = torch.linalg.vector_norm(exact, dim=-1, dtype=torch.float32)
    return norms if scales is None else norms * scales


def exact_rows(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """float64 [rows, layers, hidden]: finite wherever the stored numbers are."""
    return values.double() if scales is None else values.double() * scales[..., None]


def _decode(values: torch.Tensor) -> torch.Tensor:
    """Convert values that are not NaN to float32.

    The bits of e4m3 are put in the places of float16, whose exponents are larger by 8. On a CPU
    this is several times as fast as ``values.float()``.
    """
    bits = values.view(torch.int8).to(torch.int16)
    half = ((bits & 0x7F) << 7) | (bits & -0x8000)
    return half.view(torch.float16).float().mul_(256)
