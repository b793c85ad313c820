"""The native product of few rows: the bits of oneDNN's, whatever the rows beside it.

Where the two cannot agree (another instruction set), these hold for oneDNN's alone.
"""

from __future__ import annotations

import pytest
import torch
from cpu_features import why_no_bfloat16_products
from kernel_pools import poisoned, strided

from vllm.kernels import native_cpu
from vllm.kernels.native_cpu import ISA_NAMES, NativeCpuKernels, NativeKernelsUnavailable
from vllm.kernels.plain_linear import pack_weight, row_invariant_linear

SHAPES = [(16, 34), (100, 70), (64, 512), (77, 514), (130, 1024), (40, 1090), (65, 2080)]
"""Of weights: no multiples of the blocks, one to three sums of 512 or 1,024 terms."""

ROWS = (1, 2, 3, 6, 7, 13, 16, 17, 31, 64)


@pytest.fixture(params=ISA_NAMES)
def kernels(request: pytest.FixtureRequest) -> NativeCpuKernels:
    """The native kernels with each instruction set of this machine."""
    try:
        return NativeCpuKernels.load(request.param)
    except (NativeKernelsUnavailable, ValueError) as error:
        pytest.skip(str(error))


def _weights(rows: int, columns: int) -> list[torch.Tensor]:
    """The same weight [rows, columns] in the plain and, where there is one, in oneDNN's order."""
    plain = (torch.randn(rows, columns) / columns**0.5).bfloat16()
    packed = pack_weight(plain)
    return [plain] if packed is None else [plain, packed]


def _poison_freed_memory(rows: int, columns: int) -> None:
    """The allocator hands the last block of a size out again: as NaN, for outputs."""
    poisoned(rows, columns, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [*SHAPES, (33, 71), (1, 64)], ids=str)
def test_values(kernels: NativeCpuKernels, shape: tuple[int, int]) -> None:
    weights = _weights(*shape)
    for rows in (1, 5, 64, 65):
        x, bias = torch.randn(rows, shape[1]).bfloat16(), torch.randn(shape[0]).bfloat16()
        exact = x.double() @ weights[0].double().T
        for weight in weights:
            for inputs in (x, strided(x)):
                _poison_freed_memory(rows, shape[0])
                out = kernels.linear(inputs, weight)
                torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)
            out = kernels.linear(x, weight, bias)
            torch.testing.assert_close(out.double(), exact + bias.double(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_onednn(kernels: NativeCpuKernels, shape: tuple[int, int]) -> None:
    if shape[1] > 2048 and (missing := why_no_bfloat16_products()):
        pytest.skip(f"{missing}; without it the bits of long sums depend on the number of rows")
    x = torch.randn(200, shape[1]).bfloat16()
    for weight in _weights(*shape):
        bias = -row_invariant_linear(x, weight, None)[7]  # what is left shows the last bits
        expected = row_invariant_linear(x, weight, bias)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (*ROWS, 65):
                for start in (0, 7):
                    own = slice(start, start + rows)
                    assert torch.equal(kernels.linear(x[own], weight, bias), expected[own])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_stays_alone(kernels: NativeCpuKernels, bad: float) -> None:
    x = torch.randn(17, 1090).bfloat16()
    spoilt = x.clone()
    spoilt[5, 700] = bad
    others = torch.arange(17) != 5
    for weight in _weights(130, 1090):
        out = kernels.linear(spoilt, weight)
        assert torch.equal(out[others], kernels.linear(x, weight)[others])
        assert not out[5].isfinite().any()


def test_no_rows(kernels: NativeCpuKernels) -> None:
    for weight in _weights(64, 64):
        assert kernels.linear(torch.empty(0, 64, dtype=torch.bfloat16), weight).shape == (0, 64)


@pytest.fixture
def best() -> NativeCpuKernels:
    """Kernels that multiply themselves."""
    if missing := why_no_bfloat16_products():
        pytest.skip(missing)
    return NativeCpuKernels.load("avx512_bf16")


def test_onednn_multiplies_where_its_bits_are_others(
    best: NativeCpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_sums(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        sums = x.float() @ weight.float().T + (0 if bias is None else bias.float())
        return sums.bfloat16()

    monkeypatch.setattr(native_cpu, "row_invariant_linear", other_sums)
    weight, x = torch.randn(200, 1024).bfloat16(), torch.randn(64, 1024).bfloat16()
    for _ in range(2):
        assert torch.equal(best.linear(x, weight), other_sums(x, weight, None))


def test_few_rows_are_multiplied_here(
    best: NativeCpuKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("oneDNN multiplies in tiles, with other bits")
    for weight in _weights(128, 1024):
        x = torch.randn(64, 1024).bfloat16()
        expected = row_invariant_linear(x, weight, None)
        best.linear(x, weight)  # finds out whether it can
        with monkeypatch.context() as patch:
            patch.delattr(native_cpu, "row_invariant_linear")
            assert torch.equal(best.linear(x, weight), expected)


@pytest.mark.parametrize("shape", [(16, 32), (100, 70), (64, 512), (77, 514), (1000, 34)], ids=str)
def test_a_packed_table_is_looked_up_and_multiplied_with(
    best: NativeCpuKernels, shape: tuple[int, int]
) -> None:
    table = torch.randn(shape).bfloat16()
    packed = best.pack_table(table)
    if packed is None:
        pytest.skip("oneDNN's order is another one")
    every, some = torch.arange(shape[0]), torch.randint(shape[0], (700,))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for token_ids in (every, every[3:4], some, some[::3], some[:0]):
            _poison_freed_memory(len(token_ids), shape[1])
            rows = best.embedding(token_ids, packed)
            assert rows.dtype is torch.bfloat16
            assert torch.equal(rows, table[token_ids])
        for rows in (table[:9], torch.randn(70, shape[1]).bfloat16()):
            assert torch.equal(best.linear(rows, packed), best.linear(rows, table))
    for token_id in (-1, shape[0], shape[0] + 63):
        with pytest.raises(RuntimeError, match="lies outside of its tensor"):
            best.embedding(torch.tensor([0, token_id]), packed)


def test_tables_that_stay_as_they_are(kernels: NativeCpuKernels) -> None:
    tables = [torch.randn(64, 63).bfloat16(), torch.randn(64, 64), torch.randn(64, 64).half()]
    if kernels.isa != "avx512_bf16":
        tables.append(torch.randn(64, 64).bfloat16())
    for table in tables:
        assert kernels.pack_table(table) is None
        assert torch.equal(kernels.embedding(torch.tensor([5, 5, 63]), table), table[[5, 5, 63]])
