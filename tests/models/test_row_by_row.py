"""Functions of torch that are replaced while a module of transformers runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from vllm.model_executor.transformers_modules.row_by_row import RowByRow

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_any_shape(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    function = FUNCTIONS[name]
    for x in (
        3 * torch.randn(2, 3, 17),
        torch.randn(2, 5, 7).transpose(1, 2),
        30 * torch.randn(4, 6)[:, ::2],
        torch.randn(5),
        torch.randn(()),
        torch.randn(0, 4),
    ):
        given = x.to(dtype)
        with RowByRow():
            found = function(given)
        expected = function(given.double())
        assert found.dtype is dtype and found.shape == given.shape
        limit = 2e-6 if dtype is torch.float32 else 1e-2
        assert torch.allclose(found.double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_element_has_the_same_bits_wherever_it_stands(name: str) -> None:
    x = 3 * torch.randn(9, 37, generator=torch.Generator().manual_seed(5))
    with RowByRow():
        whole = FUNCTIONS[name](x)
        pieces = [FUNCTIONS[name](x[row : row + 1, :size]) for row in range(9) for size in (1, 37)]
    for number, piece in enumerate(pieces):
        assert torch.equal(piece[0], whole[number // 2, : piece.shape[1]])


def test_silu_in_place() -> None:
    x = torch.randn(3, 5)
    expected = functional.silu(x)
    with RowByRow():
        assert functional.silu(x, inplace=True) is x
    assert torch.allclose(x, expected, atol=1e-6)
