"""What Triton kernels take as one argument: a tensor with its strides, and its rows."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Strided(NamedTuple):
    """A tensor; elements of its last dimension lie beside each other."""

    cells: torch.Tensor
    strides: tuple[int, ...]
    """Of the dimensions before it, in elements."""


def strided(x: torch.Tensor) -> Strided:
    assert x.stride(-1) == 1 or x.shape[-1] <= 1, "the last dimension must be contiguous"
    return Strided(x, x.stride()[:-1])


@triton.jit
def read(x, row, column, inside):
    """Of ``x`` [rows, columns], in float32; zeros where nothing is ``inside``. row: int64."""
    cells = x.cells + column + row * x.strides[0]
    return tl.load(cells, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def write(x, row, column, inside, values):
    """The other way round, rounded."""
    cells = x.cells + column + row * x.strides[0]
    tl.store(cells, values.to(x.cells.dtype.element_ty), mask=inside)
