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
    """Random codes of every value; scales of both signs."""
    groups = -(-columns // group_size)
    scales = (torch.randn(rows, groups) / columns**0.5).to(scale_dtype)
    given = torch.randint(-7, 16, (rows, groups), dtype=torch.int8) if zeros else None
    if kind in ("int4", "fp4"):
        codes = torch.randint(256, (rows, -(-columns // 2)), dtype=torch.uint8)
        table = INT4_VALUES if kind == "int4" else FP4_VALUES
        return PackedWeight(codes, scales, columns, group_size, table, given)
    codes = torch.randint(256, (rows, columns), dtype=torch.uint8)
    if kind == "int8":
        return PackedWeight(codes.view(torch.int8), scales, columns, group_size, zeros=given)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    return PackedWeight(codes.view(torch.float8_e4m3fn), scales / 64, columns, group_size)


KINDS = ("int4", "fp4", "int8", "fp8")

SIZES = ((0, 8, 8, 8), (1, 1, 1, 1), (5, 33, 70, 34), (3, 96, 64, 16), (70, 512, 65, 128),
         (3, 1030, 130, 32), (140, 2100, 64, 2100))  # fmt: skip
"""Rows, terms, columns, terms of a group."""


@cases
def packed_linear(dtype: torch.dtype) -> Iterator[Case]:
    for number, (rows, terms, columns, group_size) in enumerate(SIZES):
        for kind in KINDS:
            scale_dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
            for zeros in (False, True)[: 1 if kind == "fp8" else 2]:
                weight = packed_weight(kind, columns, terms, group_size, scale_dtype, zeros)
                x = strided(torch.randn(rows, terms).to(dtype))
                bias = torch.randn(columns).to(dtype) if zeros else None
                out = torch.full((rows, columns), math.nan, dtype=dtype)
                yield Case((x, weight.make_panels(), group_size, bias, out), 2e-6)
