"""Matrix products that give a row the same bits for any number of rows."""

from __future__ import annotations

import os

import torch
from torch.nn import functional

_MIN_ROWS = {torch.float32: 16, torch.bfloat16: 4, torch.float16: 4}
"""Fewest rows for which the CPU libraries use the kernels of large products (measured:
float32 differs below 4 rows, bfloat16 at 1 row; with a margin)."""

_MIN_PRODUCT = 16 * 16 * 16
"""torch hands a bfloat16 product to oneDNN only when rows * n * m is above this."""


def row_invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x @ weight.T + bias``; x: [tokens, n], weight: [m, n]. Returns [tokens, m].

    On the CPU small products take other code paths than large ones and round
    differently, so there the product is padded with rows of zeros (and a single output
    column with a second one) until it takes the path of the large ones.
    """
    if x.device.type != "cpu":
        return functional.linear(x, weight, bias)
    num_rows = x.shape[0]
    if weight.is_mkldnn:
        x = _pad_rows(x, _few_sizes(max(num_rows, _MIN_ROWS[x.dtype])))
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x.contiguous(), weight, bias, "none", [], ""
        )
        return product[:num_rows]
    num_columns, width = weight.shape
    if num_columns == 1:
        weight = functional.pad(weight, (0, 0, 0, 1))
        bias = None if bias is None else functional.pad(bias, (0, 1))
    rows = max(num_rows, _MIN_ROWS[x.dtype], _MIN_PRODUCT // (weight.shape[0] * width) + 1)
    if x.dtype != torch.float32:  # others go to oneDNN
        rows = _few_sizes(rows)
    x = _pad_rows(x, rows)
    out = functional.linear(x.contiguous(), weight, bias)
    return out[:num_rows, :num_columns].contiguous()


def _few_sizes(num_rows: int) -> int:
    """The next of few numbers of rows, at most a sixteenth more from 256 rows on.

    oneDNN makes a kernel for every shape of product that it meets, in 0.2 ms (measured).
    """
    if num_rows <= _SMALL_STEP:
        return 1 << (num_rows - 1).bit_length()
    grain = max(_SMALL_STEP, 1 << (num_rows - 1).bit_length() >> 5)
    return -(-num_rows // grain) * grain


_SMALL_STEP = 16

for _capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    # oneDNN, and torch on top of it, would keep a thousand of these kernels, half a megabyte
    # each (measured): a process would grow for hours, whenever a step has a new size.
    os.environ.setdefault(_capacity, "64")


def _pad_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    missing = num_rows - x.shape[0]
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


_ROWS_OF_A_CHUNK = 512
"""Rows for which oneDNN chooses the order; it serves any other number as well."""


def pack_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """``weight`` [m, n] in oneDNN's own order, for :func:`row_invariant_linear`.

    Measured on Zen 5: products with few rows run twice as fast, those with many 4 to
    12 %. bfloat16 gives the same bits as the plain order. None: oneDNN has no such order
    for the dtype on this CPU, or the weight is too small to gain.
    """
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or weight.dtype not in _PACKABLE or min(weight.shape) < _MIN_PACKED_SIZE:
        return None
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
        weight.contiguous(), _ROWS_OF_A_CHUNK
    )
    return packed


_PACKABLE = (torch.float32, torch.bfloat16)
_MIN_PACKED_SIZE = 16
