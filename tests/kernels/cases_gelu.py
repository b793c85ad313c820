"""Cases of activations: GELU alone and as a gate, the clamped gate, squared ReLU, xIELU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from kernel_pools import strided
from operation_cases import Case, cases


def _calls(dtype: torch.dtype, gates: bool, *options: Any) -> Iterator[Case]:
    for rows, size in ((0, 8), (1, 2), (3, 66), (17, 200)):
        x = 3 * torch.randn(rows, size).to(dtype)
        for given in (x, strided(x)):
            out = torch.full((rows, size // 2 if gates else size), math.nan, dtype=dtype)
            yield Case((given, *options, out), 2e-6)


@cases
def gelu(dtype: torch.dtype) -> Iterator[Case]:
    return _calls(dtype, False)


@cases
def gelu_tanh(dtype: torch.dtype) -> Iterator[Case]:
    return _calls(dtype, False)


@cases
def gelu_and_mul(dtype: torch.dtype) -> Iterator[Case]:
    return _calls(dtype, True)


@cases
def gelu_tanh_and_mul(dtype: torch.dtype) -> Iterator[Case]:
    return _calls(dtype, True)


@cases
def clamped_swiglu(dtype: torch.dtype) -> Iterator[Case]:
    return _calls(dtype, True, 1.702, 2.5)


@cases
def relu_squared(dtype: torch.dtype) -> Iterator[Case]:
    return _calls(dtype, False)


@cases
def xielu(dtype: torch.dtype) -> Iterator[Case]:
    return _calls(dtype, False, 0.8, 1.3, 0.5, -1e-6)
