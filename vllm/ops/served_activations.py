"""Activations in 8 bits, as the kernels that serve a quantised checkpoint round them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

_SMALLEST_SCALE = 1e-12
"""Scale of rows that are zero or nearly zero."""


@dataclass(frozen=True)
class ServedActivations:
    """``x ~ code * scale``: the inputs of a layer, rounded before it multiplies.

    Unless it is given, a scale maps the largest magnitude of its elements to the largest code, 448
    for E4M3 or 127 for int8. Elements are divided by it in float32 and rounded to the nearest
    code, ties to even.

    dtype: dtype of the codes, torch.float8_e4m3fn or torch.int8; group_size: number of consecutive
    elements of a row that share a scale, None: the whole row; scale: the checkpoint's own scale for
    all elements; bound: limit for magnitudes before a scale is formed; powers_of_two: scales are
    rounded up to a power of two (UE8M0).
    """

    dtype: torch.dtype
    group_size: int | None = None
    has_scale: bool = False
    scale: float | None = None
    bound: float | None = None
    powers_of_two: bool = False

    def with_scale(self, scale: float) -> ServedActivations:
        return replace(self, scale=scale)

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map [rows, n] to codes in x's dtype and float32 scales, [rows, 1] or [rows, groups]."""
        is_float = self.dtype.is_floating_point
        largest = torch.finfo(self.dtype).max if is_float else torch.iinfo(self.dtype).max
        rows, columns = x.shape
        size = self.group_size or max(columns, 1)
        floats = x.float()
        if columns % size:
            floats = torch.nn.functional.pad(floats, (0, -columns % size))
        groups = floats.reshape(rows, floats.shape[1] // size, size)
        if self.scale is not None:
            scales = groups.new_full((rows, 1), self.scale)
        else:
            # Not abs().amax(): each tensor as large as x costs new memory, which is slower.
            magnitudes = torch.maximum(groups.amax(2), groups.amin(2).neg_())
            if self.bound is not None:
                magnitudes = magnitudes.clamp(max=self.bound)
            scales = (magnitudes / largest).clamp(min=_SMALLEST_SCALE)
            if self.powers_of_two:  # any bit of the mantissa carries into the exponent
                bits = (scales.view(torch.int32) + 0x007FFFFF) & 0x7F800000
                scales = bits.view(torch.float32)
        into = None if x.dtype is torch.float32 else groups
        codes = torch.div(groups, scales[:, :, None], out=into).clamp_(-largest, largest)
        codes = codes.to(self.dtype) if is_float else codes.round_()
        return codes.to(x.dtype).flatten(1)[:, :columns], scales
