"""Products with packed weights: what the codes say, and one value for any number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases_packed_linear import CODES, HAVE_ZEROS, KINDS, SCALES, packed_weight, scales_cells
from kernel_calls import Kernels

from vllm.ops.packed_linear import CutGroupError, PackedWeight, weight_of_packed_panels
from vllm.ops.served_activations import ServedActivations

SHAPES = [(1, 1, 2), (64, 64, 16), (70, 34, 40), (33, 71, 8), (570, 1090, 128), (65, 2082, 2082)]
"""Rows (of 570 a lone input row meets two panels at once), columns, columns of a group."""
SOME_ROWS = [
    *(slice(7, 8), slice(4, 7), slice(21, 26), slice(40, 46), slice(9, 17), slice(2, 18)),
    *(slice(3, 20), slice(10, 75)),
]
"""Numbers of rows on both sides of each limit up to which cells are unpacked again."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_panels_hold_the_weight(kind: str, shape: tuple[int, int, int]) -> None:
    for scale_dtype in SCALES:
        weight = packed_weight(kind, *shape, scale_dtype, kind in HAVE_ZEROS)
        again = weight_of_packed_panels(weight.make_panels(), shape[2], shape[:2])
        assert torch.equal(again.dequantise(torch.float32), weight.dequantise(torch.float32))


def test_dequantised_values_are_the_formula() -> None:
    weight = packed_weight("int4", 5, 7, 4, torch.float16, True)
    assert weight.zeros is not None
    found = weight.dequantise(torch.float32)
    for i in range(5):
        for j in range(7):
            code = int(weight.codes[i, j // 2]) >> (4 * (j % 2)) & 15
            value = CODES[code] - int(weight.zeros[i, j // 4])
            assert found[i, j] == value * weight.scales[i, j // 4].float()


def test_an_order_says_which_input_each_column_multiplies() -> None:
    weight = packed_weight("int8", 6, 10, 2, torch.float32, False)
    order = torch.randperm(10)
    ordered = PackedWeight(weight.codes, weight.scales, 10, 2, order=order)
    plain, moved = weight.dequantise(torch.float32), ordered.dequantise(torch.float32)
    assert torch.equal(moved[:, order], plain)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_one_value(
    native: Kernels, kind: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """For any number of rows, and threads; near to that of the weight in float64."""
    rows, columns, group_size = shape
    first = SHAPES.index(shape) + KINDS.index(kind)
    for scale_dtype in (SCALES[first % 5], SCALES[(first + 3) % 5]):
        for zeros in (False, True)[: 1 + (kind in HAVE_ZEROS)]:
            weight = packed_weight(kind, rows, columns, group_size, scale_dtype, zeros)
            panels = weight.make_panels()
            x, bias = torch.randn(150, columns).to(dtype), torch.randn(rows).to(dtype)
            by_row = zeros or scales_cells(kind, scale_dtype)
            x_scales = torch.rand(150, 1 if by_row else -(-columns // group_size)) + 0.5
            expected = native.packed_linear(x, panels, group_size, bias, rows, x_scales)
            size = columns if by_row else group_size
            by_column = x_scales.repeat_interleave(size, 1)[:, :columns]
            scaled = x.double() * by_column.double()
            exact = scaled @ weight.dequantise(torch.float64).double().t() + bias.double()
            error = (expected.double() - exact).abs().max() / exact.abs().max()
            assert error <= max(torch.finfo(dtype).eps, 2e-6)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for own in (slice(0, 150), *SOME_ROWS):
                    found = native.packed_linear(
                        x[own], panels, group_size, bias, rows, x_scales[own]
                    )
                    assert torch.equal(found, expected[own])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("zeros", [False, True])
def test_whole_inputs(
    native: Kernels, shape: tuple[int, int, int], zeros: bool, dtype: torch.dtype
) -> None:
    """Their sums are exact while float32 holds them, so that they are those of floats, bit by bit;
    beyond that a row has one value all the same."""
    rows, columns, group_size = shape
    weight = packed_weight("int8", rows, columns, group_size, torch.float32, zeros)
    panels, bias = weight.make_panels(), torch.randn(rows).to(dtype)
    x_scales = torch.rand(150, -(-columns // group_size)) + 0.5
    for largest in (20, 128):
        x = torch.randint(-largest, largest, (150, columns)).to(dtype)
        found, floats = (
            native.packed_linear(x, panels, group_size, bias, rows, x_scales, is_whole)
            for is_whole in (True, False)
        )
        if largest == 20 or not zeros:
            assert torch.equal(found, floats)
        by_column = x_scales.double().repeat_interleave(group_size, 1)[:, :columns]
        exact = x.double() * by_column @ weight.dequantise(torch.float64).t() + bias.double()
        error = (found.double() - exact).abs().max() / exact.abs().max()
        assert error <= max(torch.finfo(dtype).eps, 2e-6)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for own in SOME_ROWS:
                again = native.packed_linear(
                    x[own], panels, group_size, bias, rows, x_scales[own], True
                )
                assert torch.equal(again, found[own])


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("first", [-8, -7, 0, 3])
def test_tables_of_whole_numbers(kernels: Kernels, first: int, zeros: bool) -> None:
    """Wherever they begin."""
    weight = packed_weight("int4", 70, 96, 32, torch.float32, zeros)
    weight = replace(weight, table=tuple(float(first + i) for i in range(16)))
    if weight.zeros is not None:
        weight.zeros.add_(first)  # differences of -15 to 15
    x = torch.randn(5, 96)
    expected = x.double() @ weight.dequantise(torch.float64).t()
    for rows in (slice(0, 5), slice(2, 3)):
        found = kernels.packed_linear(x[rows], weight.make_panels(), 32, None, 70).double()
        assert (found - expected[rows]).abs().max() < 2e-6 * expected.abs().max()


def test_bfloat16_weights_are_not_rounded(native: Kernels) -> None:
    """A scale that bfloat16 cannot hold comes into the sums as it is."""
    weight = packed_weight("int4", 3, 64, 64, torch.float32, False)
    weight.scales.fill_(1 + 2**-9)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, ::7] = 256.0
    expected = (x.double() @ weight.dequantise(torch.float32).double().t()).to(torch.bfloat16)
    assert torch.equal(native.packed_linear(x, weight.make_panels(), 64, None, 3), expected)


@pytest.mark.parametrize("group_size", [2, 6, 7, 8, 10, 11, 600])
def test_groups_of_a_few_columns_are_not_multiplied(group_size: int) -> None:
    """More of them are in a round than the kernels keep scales for."""
    weight = packed_weight("int8", 6, 600, group_size, torch.float32, False)
    assert weight.can_be_panels() is (group_size in (8, 10, 600))


def test_what_breaks_the_contract_is_not_computed(kernels: Kernels) -> None:
    weight = packed_weight("int4", 70, 64, 16, torch.float32, False)
    x = torch.randn(3, 64)
    for bad_x, group_size, columns in ((x[:, :48], 16, 70), (x, 32, 70), (x, 16, 64)):
        with pytest.raises(AssertionError):
            kernels.packed_linear(bad_x, weight.make_panels(), group_size, None, columns)
    with pytest.raises(AssertionError):
        kernels.packed_linear(x, weight.make_panels(), 16, None, 70, torch.ones(3, 2))
    panels = replace(weight.make_panels(), scales=torch.ones(2, 16, 64))
    with pytest.raises(AssertionError):
        kernels.packed_linear(x, panels, 4, None, 70)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("columns", "group", "start", "length", "groups_of"),
    [
        (192, 32, 64, 128, 32),
        (192, 32, 0, 40, 32),  # the last group is shorter
        (192, 192, 96, 96, 96),  # a scale for a row
        (200, 128, 64, 136, 64),
        (272, 136, 136, 68, 136),
    ],
)
def test_columns_of_a_weight_are_those_of_the_whole(
    kind: str, columns: int, group: int, start: int, length: int, groups_of: int
) -> None:
    whole = packed_weight(kind, 5, columns, group, torch.float32, kind in HAVE_ZEROS)
    part = whole.narrow(1, start, length)
    assert (part.columns, part.group_size) == (length, groups_of)
    expected = whole.dequantise(torch.float32)[:, start : start + length]
    assert torch.equal(part.dequantise(torch.float32), expected)


@pytest.mark.parametrize(
    ("rule", "start", "message"),
    [
        (None, 36, "divide groups of 32 into parts of 4, which are too small"),
        (ServedActivations(torch.int8), 64, "inputs are rounded by whole rows"),
        (ServedActivations(torch.int8, 64), 32, "inputs are rounded in groups"),
    ],
)
def test_columns_that_cannot_be_had_alone(
    rule: ServedActivations | None, start: int, message: str
) -> None:
    weight = replace(packed_weight("int8", 5, 192, 32, torch.float32, False), activations=rule)
    with pytest.raises(CutGroupError, match=message):
        weight.narrow(1, start, 192 - start)
    served = replace(weight, activations=ServedActivations(torch.int8, has_scale=True, scale=0.1))
    assert served.narrow(1, 64, 128).columns == 128
