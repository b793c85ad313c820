"""The products of all experts in one launch: the host need not know each expert's token count.

A program takes a tile of one expert's pairs and a tile of its outputs. The first tile of an expert
starts at its first pair, and terms are summed in order, so a pair's bits do not depend on others.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm.ops import experts
from vllm.ops.cuda.triton_attention import _find_request


class _TileShape(NamedTuple):
    rows: int
    columns: int
    terms: int
    num_warps: int
    num_stages: int


_SIXTEEN_BITS = _TileShape(rows=64, columns=128, terms=64, num_warps=4, num_stages=3)
_FLOAT32 = _TileShape(rows=32, columns=64, terms=32, num_warps=4, num_stages=2)
"""Both are the same for any number of pairs: bits depend on the tensor-core instruction."""


@experts.expert_linear.override("cuda")
def expert_linear(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    starts: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    num_pairs, columns = out.shape
    num_experts = len(starts) - 1
    if num_pairs == 0:
        return
    shape = _FLOAT32 if x.dtype is torch.float32 else _SIXTEEN_BITS
    # Each expert's last tile may be cut short.
    grid = (num_pairs // shape.rows + num_experts, triton.cdiv(columns, shape.columns))
    _expert_kernel[grid](
        *(x, rows, starts, weight, bias, out, x.stride(0), num_experts),
        terms=x.shape[1],
        columns=columns,
        tile_rows=shape.rows,
        tile_columns=shape.columns,
        tile_terms=shape.terms,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )


@triton.jit(do_not_specialize=["num_experts"])
def _expert_kernel(
    x,
    rows,
    starts,
    weight,
    bias,
    out,
    x_stride,
    num_experts,
    terms: tl.constexpr,
    columns: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_terms: tl.constexpr,
):
    """Program (tile of pairs, tile of outputs); an expert may have one more tile than it needs."""
    index = tl.program_id(0)
    expert = _find_request(starts, num_experts, index, tile_rows, 1)
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    first = begin + (index - begin // tile_rows - expert) * tile_rows
    if first >= end:
        return
    pair = first + tl.arange(0, tile_rows)
    known = pair < end
    row = pair
    if rows is not None:
        row = tl.load(rows + pair, mask=known, other=0)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = column < columns
    cell = expert.to(tl.int64) * columns + column
    inputs = x + row.to(tl.int64)[:, None] * x_stride
    weights = weight + cell[:, None] * terms
    acc = tl.zeros([tile_rows, tile_columns], tl.float32)
    for start in range(0, terms, tile_terms):
        term = start + tl.arange(0, tile_terms)[None, :]
        if terms % tile_terms == 0:
            a = tl.load(inputs + term, mask=known[:, None], other=0.0)
            b = tl.load(weights + term, mask=inside[:, None], other=0.0)
        else:
            a = tl.load(inputs + term, mask=known[:, None] & (term < terms), other=0.0)
            b = tl.load(weights + term, mask=inside[:, None] & (term < terms), other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + cell, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = out + pair.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=known[:, None] & inside[None, :])
