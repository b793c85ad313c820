"""Tensors of every dtype go to other processes."""

from __future__ import annotations

import pickle

import pytest
import torch

from vllm.utils import pickling

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_shapes(dtype: torch.dtype) -> None:
    numbers = torch.arange(6).to(dtype)
    rows = numbers.reshape(2, 3)
    sent = [numbers[3], numbers[::2], rows, rows.T, torch.zeros(0, 4).to(dtype)]
    for mine, other in zip(sent, pickle.loads(pickling.dumps({"all": sent}))["all"], strict=True):
        assert (other.dtype, other.shape) == (dtype, mine.shape)
        assert torch.equal(other.float(), mine.float())


def test_parameters_and_what_cannot_be_pickled() -> None:
    weight = torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    other = pickle.loads(pickling.dumps(weight))
    assert isinstance(other, torch.nn.Parameter) and torch.equal(other.float(), torch.ones(3))
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickling.dumps(lambda: None)
