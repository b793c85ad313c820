"""Kernels that work token by token, against naive float64 forms."""

from __future__ import annotations

import math

import kernel_reference as reference
import pytest
import torch
from kernel_calls import Kernels
from kernel_pools import (
    AttentionPool,
    poisoned,
    poisoned_pool,
    pool_view,
    strided,
)
from kernel_reference import assert_near

from vllm.ops.row_transport import RowReport


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "columns"), [(0, 8, 8), (1, 48, 16), (5, 100, 33), (17, 64, 1), (40, 256, 24)]
)
def test_linear(
    kernels: Kernels, dtype: torch.dtype, rows: int, width: int, columns: int, with_bias: bool
) -> None:
    x = strided(torch.randn(rows, width).to(dtype), padding=8)
    weight = torch.randn(columns, width).to(dtype)
    bias = torch.randn(columns).to(dtype) if with_bias else None
    out = kernels.linear(x, weight, bias)
    assert out.shape == (rows, columns)
    if rows:
        expected = x.double() @ weight.double().t()
        assert_near(out, expected + (0 if bias is None else bias.double()), dtype)


@pytest.mark.parametrize("size", [1, 3, 16, 63, 1024, 1025, 2500])
def test_most_likely(kernels: Kernels, dtype: torch.dtype, size: int) -> None:
    """As numpy says, which documents that the first of equals and the first NaN win."""
    logits = strided(torch.randn(40, size).to(dtype), padding=5)
    for row in range(1, 30):
        logits[row, row * 7919 % size] = logits[row, row * 104729 % size] = 9  # in either order
    for row in range(10, 20):
        logits[row, [row * 31 % size, row * 1013 % size]] = math.nan
    logits[20], logits[21] = -math.inf, 0
    logits[21, size // 2] = -0.0
    logits[22], logits[22, size - 1] = -math.inf, torch.finfo(dtype).min
    logits[23, size // 3] = math.inf
    expected = torch.from_numpy(logits.float().numpy().argmax(axis=1))
    for rows in (40, 1, 0):
        assert torch.equal(kernels.most_likely(logits[:rows]), expected[:rows])


@pytest.mark.parametrize(
    "shape", [(1, 7), (3, 64), (5, 1000), (4, 3, 24), (2, 4, 80), (3, 1, 256)], ids=str
)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(
    kernels: Kernels, dtype: torch.dtype, shape: tuple[int, ...], offset: float
) -> None:
    x = strided(torch.randn(shape).to(dtype) * 3)
    weight = torch.randn(shape[-1]).to(dtype)
    out = kernels.rms_norm(x, weight, 1e-6, offset)
    assert out.is_contiguous()
    expected = reference.rms_norm(x.double(), 1e-6) * (weight.double() + offset)
    assert_near(out, expected, dtype, roundings=3 if offset == 0.0 else 1)


def test_rms_norm_without_weight_and_in_which_order_it_rounds(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    x = torch.randn(9, 48).to(dtype)
    normalised = kernels.rms_norm(x, None, 1e-5)
    assert_near(normalised, reference.rms_norm(x.double(), 1e-5), dtype)
    weight = torch.randn(48).to(dtype)
    # Llama: the normalised value is rounded first, so this product is exact in both.
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), normalised * weight)


def test_rms_norm_of_tiny_and_huge_rows(kernels: Kernels) -> None:
    x = torch.stack((torch.zeros(40), torch.full((40,), 1e-4), torch.full((40,), 1e15)))
    out = kernels.rms_norm(x, torch.ones(40), 1e-6, 1.0)
    expected = torch.tensor([0.0, 2e-4 / math.sqrt(1e-8 + 1e-6), 2.0])
    torch.testing.assert_close(out, expected[:, None].expand(3, 40))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("width", [33, 256])
def test_add_rms_norm(kernels: Kernels, dtype: torch.dtype, offset: float, width: int) -> None:
    x, residual = torch.randn(2, 6, width).to(dtype)
    x, weight = strided(x), torch.randn(width).to(dtype)
    total = x + residual
    out = kernels.add_rms_norm(x, residual, weight, 1e-6, offset)
    assert torch.equal(residual, total)
    assert torch.equal(out, kernels.rms_norm(total, weight, 1e-6, offset))


@pytest.mark.parametrize("shape", [(5, 1, 8), (3, 3, 24), (2, 4, 128)], ids=str)
def test_gated_rms_norm(kernels: Kernels, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    gate = strided((torch.randn(shape) * 4).to(dtype))
    out = kernels.gated_rms_norm(x, gate, weight, 1e-6)
    assert out.is_contiguous()
    expected = reference.rms_norm(x.double(), 1e-6) * weight.double()
    assert_near(out, expected * reference.silu(gate.double()), dtype, roundings=3)


@pytest.mark.parametrize("width", [1, 17, 96])
def test_silu_and_mul(kernels: Kernels, dtype: torch.dtype, width: int) -> None:
    x = strided((torch.randn(7, 2 * width) * 5).to(dtype))
    x[0, 0], x[1, 0] = 200.0, -200.0
    gate, up = x.double().chunk(2, dim=-1)
    assert_near(kernels.silu_and_mul(x), reference.silu(gate) * up, dtype)


def test_sigmoid_gate(kernels: Kernels, dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, 24).to(dtype)
    gate = strided((torch.randn(7, 3, 24) * 5).to(dtype), padding=24)
    gate[0, 0, 0], gate[1, 0, 0] = 200.0, -200.0
    out = kernels.sigmoid_gate(x, gate)
    assert_near(out, x.double() * torch.sigmoid(gate.double()), dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "rotary_dim"),
    [(1, 1, 8, 8), (3, 1, 24, 12), (8, 2, 80, 80), (4, 4, 256, 64)],
)
def test_rotary_embedding(
    kernels: Kernels,
    dtype: torch.dtype,
    interleaved: bool,
    heads: int,
    kv_heads: int,
    head_size: int,
    rotary_dim: int,
) -> None:
    tokens = 6
    positions = torch.tensor([0, 1, 2, 49, 7, 7])
    angles = torch.rand(50, rotary_dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    # Query and key are slices of one projection, heads of the query have gaps.
    fused = torch.randn(tokens, (2 * heads + 2 * kv_heads) * head_size).to(dtype)
    before = fused.clone()
    split = fused.view(tokens, -1, head_size)
    query, key = split[:, 0 : 2 * heads : 2], split[:, 2 * heads : 2 * heads + kv_heads]
    expected = [
        reference.rotate(part.double(), positions, cos_sin.double(), interleaved)
        for part in (query, key)
    ]
    kernels.rotary_embedding(positions, query, key, cos_sin, interleaved)
    for part, wanted in zip((query, key), expected, strict=True):
        assert_near(part, wanted, dtype)
    untouched = before.view(split.shape)
    assert torch.equal(split[..., rotary_dim:], untouched[..., rotary_dim:])
    assert torch.equal(split[:, 1 : 2 * heads : 2], untouched[:, 1 : 2 * heads : 2])
    assert torch.equal(split[:, 2 * heads + kv_heads :], untouched[:, 2 * heads + kv_heads :])


@pytest.mark.parametrize(
    ("kv_heads", "head_size", "pages"), [(1, 8, 1), (3, 24, 5), (2, 80, 9), (4, 256, 4)]
)
def test_write_kv(
    kernels: Kernels, dtype: torch.dtype, kv_heads: int, head_size: int, pages: int
) -> None:
    pool = AttentionPool(dtype, kv_heads, head_size, pages, num_blocks=7)
    key, value = (strided(torch.randn(20, kv_heads, head_size).to(dtype)) for _ in range(2))
    slots = torch.randperm(7 * pool.tokens_per_block)[:20]
    slots[torch.tensor([0, 7, 19])] = -1
    expected = pool.pool.clone()
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, pool.tokens_per_block)
        cell = pool.view_of(expected)[block, offset // 16, offset % 16]
        cell[:, :head_size], cell[:, head_size:] = key[t], value[t]
    kernels.write_kv(key, value, pool.kv_cache, slots)
    assert torch.equal(pool.pool, expected)


def test_copy_blocks(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.ops.rows._COPY_SLICE_BYTES", 5000)  # two blocks at once
    pool = torch.randint(-128, 128, (12, 2112), dtype=torch.int8)
    expected = pool.clone()
    sources, destinations = torch.tensor([3, 9, 3, 0, 7]), torch.tensor([1, 11, 2, 5, 4])
    expected[destinations] = expected[sources]
    kernels.copy_blocks(pool, sources, destinations)
    assert torch.equal(pool, expected)


def _row_cache(
    dtype: torch.dtype, num_blocks: int, rows: int, layers: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned pool, and its view [blocks, rows, layers, hidden]."""
    column_bytes = width * dtype.itemsize
    pool = poisoned_pool(num_blocks, -(-rows * layers * column_bytes // 64) * 64 + 64)
    strides = (layers * column_bytes, column_bytes, dtype.itemsize)
    return pool, pool_view(pool, dtype, (rows, layers, width), strides)


@pytest.mark.parametrize("with_residual", [False, True])
def test_capture_rows(kernels: Kernels, dtype: torch.dtype, with_residual: bool) -> None:
    rows, layers, width = 5, 3, 37
    pool, cache = _row_cache(dtype, 6, rows, layers, width)
    expected = pool.clone()
    strides = tuple(stride * dtype.itemsize for stride in cache.stride()[1:])
    expected_cache = pool_view(expected, dtype, tuple(cache.shape[1:]), strides)
    hidden, residual = strided(torch.randn(11, width).to(dtype)), torch.randn(11, width).to(dtype)
    stream = hidden + residual if with_residual else hidden
    slots = torch.randperm(6 * rows)[:11]
    slots[torch.tensor([2, 10])] = -1
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_cache[slot // rows, slot % rows, 2] = stream[t]
    kernels.capture_rows(cache, slots, 2, hidden, residual if with_residual else None)
    assert torch.equal(pool, expected)


def test_gather_rows_copies_and_finds_the_first_bad_cells(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    rows, layers, width = 4, 3, 33
    pool, cache = _row_cache(dtype, 5, rows, layers, width)
    slots = torch.randperm(5 * rows)[:9]
    wanted = torch.randn(9, layers, width).to(dtype)
    cache[slots // rows, slots % rows] = wanted

    def gather() -> tuple[torch.Tensor, RowReport]:
        before, out = pool.clone(), poisoned(9, layers, width, dtype=dtype)
        report = kernels.gather_rows(cache, slots, out)
        assert torch.equal(pool, before)
        return out, report

    out, report = gather()
    assert torch.equal(out, wanted)
    assert report == RowReport(-1, -1, -1, -1)

    def cell(row: int, column: int) -> torch.Tensor:
        return cache[slots[row] // rows, slots[row] % rows, column]

    cell(7, 0)[width - 1] = float("nan")
    cell(5, 2)[3] = float("-inf")
    cell(8, 1).zero_()
    cell(6, 2).copy_(torch.zeros(width).mul(-1))  # negative zeros are zeros
    out, report = gather()
    assert report == RowReport(5, 2, 6, 2)
    assert out[5, 2, 3] == float("-inf")
    assert torch.isnan(out[7, 0, width - 1])
    assert kernels.gather_rows(cache, slots[:0], out[:0]) == RowReport(-1, -1, -1, -1)
