"""A weight by itself: pieces that arrive in any order, and become panels while they do."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from vllm.model_executor.layers import weight as weight_module
from vllm.model_executor.layers.weight import Weight
from vllm.model_executor.utils import WeightFormatError, WeightShapeError
from vllm.ops.linear import make_panels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def panels_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are no kernels."""
    monkeypatch.setattr(weight_module, "prefers_panels", lambda device: True)


def underway(*shape: int, dtype: torch.dtype = torch.float32) -> Weight:
    weight = Weight(nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
    weight.begin()
    return weight


def finished(rows: torch.Tensor) -> Weight:
    weight = underway(*rows.shape, dtype=rows.dtype)
    weight.put(rows)
    weight.finish()
    return weight


def all_rows(weight: Weight, table: int = 0) -> torch.Tensor:
    return weight.look_up(torch.arange(weight.shape[-2]), table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "bounds", [(0, 130), (0, 64, 192, 200), (0, 128, 129, 320), (0, 7, 64, 90), (0, 3, 9, 50)]
)
def test_pieces_in_any_order(bounds: tuple[int, ...], dtype: torch.dtype) -> None:
    """Pieces may begin and end inside of a panel."""
    rows = torch.randn(bounds[-1], 35).to(dtype)
    wider = torch.randn(bounds[-1], 70).to(dtype)
    wider[:, 3:38] = rows
    pieces = list(pairwise(bounds))
    for seed in range(6):
        random.Random(seed).shuffle(pieces)
        weight = underway(*rows.shape, dtype=dtype)
        for first, end in pieces:
            weight.put(wider[first:end, 3:38], first)
        weight.finish()
        assert torch.equal(weight.parameter, make_panels(rows))
        assert torch.equal(all_rows(weight), rows)


@pytest.mark.parametrize("size", [64, 30])
def test_pieces_of_experts(size: int) -> None:
    rows = torch.randn(3, 2 * size, 34).bfloat16()
    places = [(expert, part) for expert in range(3) for part in range(2)]
    for seed in range(6):
        random.Random(seed).shuffle(places)
        weight = underway(*rows.shape, dtype=torch.bfloat16)
        for expert, part in places:
            weight.put(rows[expert, part * size : (part + 1) * size], part * size, expert)
        weight.finish()
        assert torch.equal(weight.parameter, make_panels(rows))
        assert torch.equal(all_rows(weight, 1), rows[1])


def test_a_piece_of_another_dtype_and_layout() -> None:
    rows = torch.randn(40, 130)
    weight = underway(130, 40, dtype=torch.bfloat16)
    weight.put(rows.T)
    weight.finish()
    assert torch.equal(weight.parameter, make_panels(rows.T.bfloat16()))


def test_a_parameter_that_loads_has_no_memory_and_no_values() -> None:
    weight = underway(1000, 1000)
    parameter = weight.parameter
    assert parameter.untyped_storage().nbytes() == parameter.itemsize
    weight.put(torch.ones(1000, 1000))
    assert parameter.shape == (1000, 1000) and parameter.isnan().all()
    with pytest.raises(RuntimeError):  # nor can anything be written there
        parameter.data.copy_(torch.ones(1000, 1000))


def test_rows_stay_in_rows_where_no_product_reads_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_module, "prefers_panels", lambda device: False)
    weight = underway(70, 3)
    weight.put(torch.ones(6, 3), 64)
    assert (weight.parameter[64:] == 1).all()
    weight.finish()
    assert weight.is_in_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "end"), [(0, 200), (0, 64), (5, 17), (60, 70), (130, 200)])
def test_replaced_rows_are_those_of_a_new_weight(first: int, end: int, dtype: torch.dtype) -> None:
    """In the same memory, panels with rows of both kinds included."""
    rows, new = (torch.randn(200, 33).to(dtype) for _ in range(2))
    weight = finished(rows)
    address = weight.parameter.data_ptr()
    weight.replace([(new[first:end], first, 0)])
    rows[first:end] = new[first:end]
    assert torch.equal(weight.parameter, make_panels(rows))
    assert weight.parameter.data_ptr() == address


def test_all_pieces_of_a_replacement_fit_or_none_is_taken() -> None:
    rows = torch.randn(100, 8)
    weight = finished(rows)
    for bad, error in (
        ((torch.ones(10, 9), 50, 0), WeightShapeError),
        ((torch.ones(51, 8), 50, 0), WeightShapeError),
        ((torch.ones(10, 8, dtype=torch.int8), 50, 0), WeightFormatError),
    ):
        with pytest.raises(error):
            weight.replace([(torch.ones(10, 8), 0, 0), bad])
        assert torch.equal(all_rows(weight), rows)
