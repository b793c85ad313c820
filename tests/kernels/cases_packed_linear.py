"""Cases of products with packed weights: every kind of codes, scales and zeros."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from kernel_pools import strided
from operation_cases import Case, cases

from vllm.ops.packed_linear import FP4_VALUES, INT4_VALUES, PackedWeight


def packed_weight(
    kind: str, rows: int, columns: int, group_size: int, scale_dtype: torch.dtype, zeros: bool
) -> PackedWeight:
    """Random codes of every value; scales of both signs, where their dtype has them."""
    groups = -(-columns // group_size)
    scales, factors = (torch.randn(rows, groups) / columns**0.5).to(scale_dtype), None
    if scale_dtype.itemsize == 1:
        bytes_of_scales = torch.randint(100, 120, (rows, groups), dtype=torch.uint8)
        scales, factors = bytes_of_scales.view(scale_dtype), torch.randn(rows) / 2**12
    if kind in ("int4", "fp4"):
        codes = torch.randint(256, (rows, -(-columns // 2)), dtype=torch.uint8)
        given = torch.randint(16, (rows, groups), dtype=torch.int8) if zeros else None
        table = FP4_VALUES if kind == "fp4" else CODES if zeros else INT4_VALUES
        return PackedWeight(codes, scales, columns, group_size, table, given, factors=factors)
    codes = torch.randint(256, (rows, columns), dtype=torch.uint8)
    if kind == "int8":
        given = torch.randint(-128, 128, (rows, groups), dtype=torch.int8) if zeros else None
        values = codes.view(torch.int8)
    else:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
        given, values = None, codes.view(torch.float8_e4m3fn)
    return PackedWeight(values, scales / 64 if factors is None else scales, columns, group_size,
                        zeros=given, factors=factors)  # fmt: skip


def scales_cells(kind: str, scale_dtype: torch.dtype) -> bool:
    """Return whether scales are multiplied into the cells; no inputs have scales by group then."""
    return kind in ("int4", "fp4") and scale_dtype.itemsize == 1


CODES = tuple(map(float, range(16)))
KINDS = ("int4", "fp4", "int8", "fp8")
HAVE_ZEROS = ("int4", "int8")
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e8m0fnu)

SIZES = ((0, 8, 8, 8), (1, 1, 1, 1), (5, 33, 70, 40), (3, 96, 64, 16), (70, 512, 65, 128),
         (3, 1030, 130, 32), (140, 2100, 64, 2100), (2, 3100, 70, 1544), (4, 71, 5, 8))  # fmt: skip
"""Rows, terms, columns, terms of a group."""


@cases
def packed_linear(dtype: torch.dtype) -> Iterator[Case]:
    for number, (rows, terms, columns, group_size) in enumerate(SIZES):
        for kind in KINDS:
            for zeros in (False, True)[: 1 + (kind in HAVE_ZEROS)]:
                scale_dtype = SCALES[(number + zeros) % len(SCALES)]
                weight = packed_weight(kind, columns, terms, group_size, scale_dtype, zeros)
                x = strided(torch.randn(rows, terms).to(dtype))
                groups = -(-terms // group_size)
                scales = (None, torch.rand(rows, 1), torch.rand(rows, groups))[number % 3]
                if scales_cells(kind, scale_dtype):
                    scales = None
                bias = torch.randn(columns).to(dtype) if zeros else None
                out = torch.full((rows, columns), math.nan, dtype=dtype)
                panels = weight.make_panels()
                yield Case((x, panels, group_size, scales, False, bias, out), 3e-6)
                if kind == "int8":
                    whole = strided(torch.randint(-128, 128, (rows, terms)).to(dtype))
                    yield Case((whole, panels, group_size, scales, True, bias, out), 3e-6)
