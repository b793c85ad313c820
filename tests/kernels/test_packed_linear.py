"""Products with packed weights are, bit for bit, those with the dequantised ones."""

from __future__ import annotations

import pytest
import torch
from cases_packed_linear import KINDS, packed_weight
from kernel_calls import Kernels

from vllm.ops.linear import make_panels, weight_of_panels
from vllm.ops.packed_linear import PackedWeight, weight_of_packed_panels

SHAPES = [(1, 1, 2), (64, 64, 16), (70, 34, 34), (33, 71, 8), (130, 1090, 128), (65, 2082, 6)]
"""Rows, columns, columns of a group."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_panels_hold_the_weight(kind: str, shape: tuple[int, int, int]) -> None:
    weight = packed_weight(kind, *shape, torch.bfloat16, kind != "fp8")
    again = weight_of_packed_panels(weight.make_panels(), shape[2], shape[:2])
    assert torch.equal(again.dequantise(torch.float32), weight.dequantise(torch.float32))


def test_dequantised_values_are_the_formula() -> None:
    weight = packed_weight("int4", 5, 7, 4, torch.float16, True)
    assert weight.zeros is not None
    found = weight.dequantise(torch.float32)
    for i in range(5):
        for j in range(7):
            code = int(weight.codes[i, j // 2]) >> (4 * (j % 2)) & 15
            value = code - 8 - int(weight.zeros[i, j // 4])
            assert found[i, j] == value * weight.scales[i, j // 4].float()


def test_an_order_says_which_input_each_column_multiplies() -> None:
    weight = packed_weight("int8", 6, 10, 2, torch.float32, False)
    order = torch.randperm(10)
    ordered = PackedWeight(weight.codes, weight.scales, 10, 2, order=order)
    plain, moved = weight.dequantise(torch.float32), ordered.dequantise(torch.float32)
    assert torch.equal(moved[:, order], plain)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_dequantised_weight(
    kernels: Kernels, kind: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """For any number of rows, and threads."""
    if kernels.name == "plain":
        pytest.skip("plain torch dequantises")
    rows, columns, group_size = shape
    for scale_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for zeros in (False, True)[: 1 if kind == "fp8" else 2]:
            weight = packed_weight(kind, rows, columns, group_size, scale_dtype, zeros)
            panels, dense = weight.make_panels(), make_panels(weight.dequantise(dtype))
            assert weight_of_panels(dense, rows, columns).isfinite().all()
            x, bias = torch.randn(150, columns).to(dtype), torch.randn(rows).to(dtype)
            expected = kernels.linear(x, dense, bias, columns=rows)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for own in (slice(0, 150), slice(7, 8), slice(3, 20), slice(10, 75)):
                    found = kernels.packed_linear(x[own], panels, group_size, bias, rows)
                    assert torch.equal(found, expected[own])


def test_what_breaks_the_contract_is_not_computed(kernels: Kernels) -> None:
    weight = packed_weight("int4", 70, 64, 16, torch.float32, False)
    x = torch.randn(3, 64)
    for bad_x, group_size, columns in ((x[:, :62], 16, 70), (x, 32, 70), (x, 16, 64)):
        with pytest.raises(AssertionError):
            kernels.packed_linear(bad_x, weight.make_panels(), group_size, None, columns)
