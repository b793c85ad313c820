"""Products with weights: their values, and that a row has the same bits whatever is beside it."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_calls import ISAS_OF_PAIRS, Kernels
from kernel_pools import strided

from tests.emulated_tiles import NAME
from vllm.ops import linear as linear_module
from vllm.ops.linear import make_panels, panels_shape, weight_of_panels

SHAPES = [(1, 1), (1, 64), (3, 7), (16, 34), (33, 71), (100, 70), (64, 512), (77, 514),
          (130, 1024), (40, 1090), (65, 2081), (1090, 416)]  # fmt: skip
"""Shapes of weights. Some are odd or not multiples of the blocks; their terms make one to three
sums of 512 or 1,024. Tiles multiply the last in several tasks (csrc/cpu/tile_product.h)."""

ROWS = (1, 2, 3, 6, 7, 13, 16, 17, 31, 64, 65, 129, 300)
"""Around the numbers of rows that are multiplied together."""


def _weights(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same weight as it is and as panels."""
    plain = (torch.randn(shape) / shape[1] ** 0.5).to(dtype)
    return plain, make_panels(plain)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_panels_hold_the_weight_and_zeros(shape: tuple[int, int], dtype: torch.dtype) -> None:
    plain, panels = _weights(shape, dtype)
    assert panels.shape == panels_shape(*shape, dtype)
    assert torch.equal(weight_of_panels(panels, *shape), plain)
    assert torch.count_nonzero(panels) == torch.count_nonzero(plain)


def test_panels_of_a_transposed_row(dtype: torch.dtype) -> None:
    """torch calls it dense, with any stride of its one term."""
    row = torch.randn(1, 70).to(dtype).t()
    assert torch.equal(weight_of_panels(make_panels(row), 70, 1), row)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    plain, panels = _weights(shape, dtype)
    bias = torch.randn(shape[0]).to(dtype)
    ulp = torch.finfo(dtype).eps
    for rows in (1, 5, 64, 65, 300):
        x = torch.randn(rows, shape[1]).to(dtype)
        exact = x.double() @ plain.double().T
        magnitude = x.double().abs() @ plain.double().abs().T
        for inputs in (x, strided(x)):
            for weight in (plain, strided(plain), panels):
                out = kernels.linear(inputs, weight, columns=shape[0])
                assert ((out - exact).abs() <= 0.51 * ulp * exact.abs() + 1e-6 * magnitude).all()
        out = kernels.linear(x, panels, bias, columns=shape[0])
        exact += bias.double()
        assert ((out - exact).abs() <= 0.51 * ulp * exact.abs() + 1e-6 * (magnitude + 1)).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_do_not_depend_on_others(
    native: Kernels, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Nor on how the weight lies, or on threads. The bias takes the leading bits away."""
    plain, panels = _weights(shape, dtype)
    x = torch.randn(400, shape[1]).to(dtype)
    bias = -native.linear(x[7:8], plain)[0]
    expected = native.linear(x, plain, bias)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in ROWS:
            for own in (slice(0, rows), slice(7, 7 + rows)):
                for weight in (plain, panels):
                    out = native.linear(x[own], weight, bias, columns=shape[0])
                    assert torch.equal(out, expected[own])


@pytest.mark.parametrize("counts", [(1, 1, 0, 1, 1, 1), (3, 9, 2, 4, 0, 5), (0, 1, 60, 0, 2, 1)])
def test_experts_have_the_bits_of_single_products(
    native: Kernels, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """On threads, too, which take an expert each unless one has most of the rows."""
    columns, terms, num_rows = 200, 300, sum(counts)
    made = [_weights((columns, terms), dtype) for _ in counts]
    x, bias = torch.randn(40, terms).to(dtype), torch.randn(len(counts), columns).to(dtype)
    rows = torch.randint(40, (num_rows,))
    starts = torch.tensor([0, *itertools.accumulate(counts)])
    expected = torch.cat(
        [
            native.linear(x[rows[begin:end]], plain, bias[expert])
            for expert, (plain, (begin, end)) in enumerate(
                zip((plain for plain, _ in made), itertools.pairwise(starts.tolist()), strict=True)
            )
        ]
    )
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for weights in zip(*made, strict=True):
            weight = torch.stack(weights)
            found = native.expert_linear(x, rows, starts, weight, bias, columns)
            assert torch.equal(found, expected)
            found = native.expert_linear(x[rows], None, starts, weight, bias, columns)
            assert torch.equal(found, expected)


def test_a_large_weight_that_passes_the_caches_by(native: Kernels, dtype: torch.dtype) -> None:
    """As few rows read it, and by other loads where it begins at a whole line."""
    panels = _weights((1030, 1090), dtype)[1]
    assert panels.nbytes >= 2**21
    shifted = torch.empty(panels.numel() + 2, dtype=dtype)[2:].view(panels.shape).copy_(panels)
    assert panels.data_ptr() % 64 == 0 and shifted.data_ptr() % 64
    x = torch.randn(14, 1090).to(dtype)
    expected = native.linear(x, panels, columns=1030)
    for rows in range(1, 8):
        for weight in (panels, shifted):
            assert torch.equal(native.linear(x[:rows], weight, columns=1030), expected[:rows])


def _sums_in_order(x: torch.Tensor, weight: torch.Tensor, block: int) -> torch.Tensor:
    """Add in the order that linear.cpp documents for float32, term by term: one row, [columns]."""
    total = torch.zeros(len(weight))
    for start in range(0, len(x), block):
        part = torch.zeros(len(weight))
        for i in range(start, min(start + block, len(x))):
            # Exact in float64 but for the one rounding that a fused multiply-add makes.
            part = (part.double() + x[i].double() * weight[:, i].double()).float()
        total = part if start == 0 else total + part
    return total


@pytest.mark.parametrize(("terms", "block"), [(70, 512), (1024, 512), (1025, 1024), (2100, 1024)])
def test_the_order_of_sums_is_the_documented_one(
    native: Kernels, terms: int, block: int, dtype: torch.dtype
) -> None:
    if dtype is torch.bfloat16 and native.isa in ISAS_OF_PAIRS:
        pytest.skip("pairs of products are added first there")
    weight, x = torch.randn(70, terms).to(dtype), torch.randn(3, terms).to(dtype)
    expected = torch.stack([_sums_in_order(row, weight, block) for row in x]).to(dtype)
    assert torch.equal(native.linear(x, make_panels(weight), columns=70), expected)


def _sums_by_tiles(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add in the order that tiles.h documents, cell by cell; subnormal numbers count as zeros."""

    def normal(values: torch.Tensor) -> torch.Tensor:
        return values.where(values.abs() >= torch.finfo(torch.float32).tiny, 0.0)

    total = torch.zeros(len(weight))
    for start in range(0, len(x), 32):
        chains = torch.zeros(2, len(weight))  # of the first terms of cells, and of the second ones
        for i in range(start, min(start + 32, len(x))):
            product = normal(x[i].float()).double() * normal(weight[:, i].float()).double()
            chains[i % 2] = normal((chains[i % 2].double() + product).float())
        total = normal(total + normal(chains[0] + chains[1]))
    return total


@pytest.mark.parametrize(
    "native",
    [
        pytest.param("amx_bf16", marks=pytest.mark.isa("amx_bf16")),
        pytest.param(NAME, marks=[pytest.mark.isa("avx512_bf16"), pytest.mark.exhaustive]),
    ],
    indirect=True,
)
@pytest.mark.parametrize("terms", [70, 1024, 2100])
@pytest.mark.parametrize("rows", [2, 17])
def test_the_order_of_sums_by_tiles_is_the_documented_one(
    native: Kernels, terms: int, rows: int
) -> None:
    """Halves of the terms cancel out, so that what is left is what the sums rounded."""
    weight, x = torch.randn(70, terms // 2), torch.randn(rows, terms // 2)
    weight, x = torch.cat([weight, weight], 1).bfloat16(), torch.cat([x, -x], 1).bfloat16()
    x[0] *= 2.0**-126  # products and sums are subnormal
    weight[0], x[:, 5] = 2.0**-130, 2.0**10
    expected = torch.stack([_sums_by_tiles(row, weight) for row in x]).bfloat16()
    assert expected[1:].count_nonzero() > 60 * (rows - 1)
    assert torch.equal(native.linear(x, make_panels(weight), columns=70), expected)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_stays_alone(
    kernels: Kernels, bad: float, dtype: torch.dtype
) -> None:
    x = torch.randn(17, 1090).to(dtype)
    spoilt = x.clone()
    spoilt[5, 700] = bad
    others = torch.arange(17) != 5
    for weight in _weights((130, 1090), dtype):
        out = kernels.linear(spoilt, weight, columns=130)
        assert torch.equal(out[others], kernels.linear(x, weight, columns=130)[others])
        assert not out[5].isfinite().any()


def test_no_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    for weight in _weights((65, 64), dtype):
        x = torch.empty(0, 64, dtype=dtype)
        assert kernels.linear(x, weight, columns=65).shape == (0, 65)


@pytest.mark.parametrize("shape", [(16, 32), (100, 70), (64, 511), (77, 514), (1000, 34)], ids=str)
def test_a_table_of_panels_is_looked_up(
    kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    table = torch.randn(shape).to(dtype)
    panels = make_panels(table)
    every, some = torch.arange(shape[0]), torch.randint(shape[0], (700,))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for token_ids in (every, every[3:4], some, some[::3].contiguous(), some[:0]):
            rows = kernels.panel_embedding(token_ids, panels, table.shape)
            assert torch.equal(rows, table[token_ids])
    if kernels.name == "plain":
        return
    for token_id in (-1, shape[0], shape[0] + 63):
        with pytest.raises(RuntimeError, match="lies outside of its tensor"):
            kernels.panel_embedding(torch.tensor([0, token_id]), panels, table.shape)


def test_what_breaks_the_contract_is_not_computed(kernels: Kernels) -> None:
    """Shapes that do not belong together would read memory that is not theirs."""
    x, weight = torch.randn(3, 64), torch.randn(70, 64)
    for bad_x, bad_weight, bad_bias in (
        (x[:, :63], weight, None),
        (x, weight.bfloat16(), None),
        (x, weight.t(), None),
        (x, make_panels(weight[:, :62]), None),
        (x, weight, torch.randn(70).bfloat16()),
    ):
        with pytest.raises(AssertionError):
            kernels.linear(bad_x, bad_weight, bad_bias, columns=70)


def test_plain_products_that_favour_rows_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = linear_module._multiply
    favoured = {1, 4, 8, 16, 64}

    def unevenly(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
        made = multiply(x, weight, parts)
        if parts in favoured:
            made[-1] = made[-1].nextafter(torch.tensor(9e9))
        return made

    monkeypatch.setattr(linear_module, "_multiply", unevenly)
    choose = linear_module._parts_of_a_product.__wrapped__
    threads = torch.get_num_threads()
    assert choose(70, 33) == 0
    favoured.discard(64)
    assert choose(70, 33) in (0, 64)
    assert torch.get_num_threads() == threads
    x, weight = torch.randn(64, 70), torch.randn(33, 70)
    expected = x.double() @ weight.double().t()
    for parts in (0, 1, 4, 8, 16, 64):
        torch.testing.assert_close(multiply(x, weight, parts).double(), expected, atol=1e-4, rtol=0)
