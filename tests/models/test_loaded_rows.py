"""Weights that become panels while they load."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from vllm.model_executor.layers import loaded_rows
from vllm.model_executor.layers.loaded_rows import LoadedRows
from vllm.ops.linear import make_panels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def panels_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are no kernels."""
    monkeypatch.setattr(loaded_rows, "prefers_panels", lambda device: True)


def _underway(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, LoadedRows]:
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    rows = LoadedRows(parameter)
    rows.become_panels()
    return parameter, rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "bounds", [(0, 130), (0, 64, 192, 200), (0, 128, 129, 320), (0, 7, 64, 90)]
)
def test_pieces_in_any_order(bounds: tuple[int, ...], dtype: torch.dtype) -> None:
    """Those that begin inside of a panel too."""
    weight = torch.randn(bounds[-1], 35).to(dtype)
    whole = torch.randn(bounds[-1], 70).to(dtype)
    whole[:, 3:38] = weight
    pieces = list(pairwise(bounds))
    for seed in range(6):
        random.Random(seed).shuffle(pieces)
        parameter, rows = _underway(*weight.shape, dtype=dtype)
        for first, end in pieces:
            rows.put(first, whole[first:end, 3:38])
        assert torch.equal(rows.panels(), make_panels(weight))
        rows.lay_plain()
        assert torch.equal(parameter, weight)


@pytest.mark.parametrize("size", [64, 30])
def test_pieces_of_experts(size: int) -> None:
    weight = torch.randn(3, 2 * size, 34).bfloat16()
    places = [(expert, part) for expert in range(3) for part in range(2)]
    for seed in range(6):
        random.Random(seed).shuffle(places)
        parameter, rows = _underway(*weight.shape, dtype=torch.bfloat16)
        for expert, part in places:
            rows.put(part * size, weight[expert, part * size : (part + 1) * size], expert)
        assert torch.equal(rows.panels(), make_panels(weight))
        rows.lay_plain()
        assert torch.equal(parameter, weight)


def test_a_piece_of_another_dtype_and_layout() -> None:
    weight = torch.randn(40, 130)
    _, rows = _underway(130, 40, dtype=torch.bfloat16)
    rows.put(0, weight.T)
    assert torch.equal(rows.panels(), make_panels(weight.T.bfloat16()))


def test_a_parameter_that_loads_has_no_memory_and_no_values() -> None:
    parameter, rows = _underway(1000, 1000)
    assert parameter.untyped_storage().nbytes() == parameter.itemsize
    rows.put(0, torch.ones(1000, 1000))
    assert parameter.shape == (1000, 1000) and parameter.isnan().all()
    with pytest.raises(RuntimeError):  # nor can anything be written there
        parameter.data.copy_(torch.ones(1000, 1000))


def test_rows_stay_plain_where_no_product_reads_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_rows, "prefers_panels", lambda device: False)
    parameter, rows = _underway(70, 3)
    rows.put(64, torch.ones(6, 3))
    assert (parameter[64:] == 1).all()
