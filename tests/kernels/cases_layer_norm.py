"""Cases of layer norms."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from kernel_pools import strided
from operation_cases import Case, cases


def _tolerance(dtype: torch.dtype) -> float:
    return 2e-6 if dtype is torch.float32 else 2**-8


@cases
def layer_norm(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((0, 8), (1, 1), (3, 33), (17, 100), (5, 3, 24), (4, 2, 64)):
        x = (torch.randn(shape) + 2).to(dtype)
        bias = torch.randn(shape[-1]).to(dtype)
        weights = [torch.randn(shape[-1:]).to(dtype)]
        if len(shape) == 3:
            weights.append(torch.randn(shape[1:]).to(dtype))
        for given in (x, strided(x)):
            for weight in weights:
                for added in (None, bias):
                    out = torch.full(shape, math.nan, dtype=dtype)
                    yield Case((given, weight, added, 1e-5, out), _tolerance(dtype))


@cases
def add_layer_norm(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((0, 8), (1, 2), (3, 33), (17, 100)):
        x, residual = (torch.randn(2, *shape) + 1).to(dtype)
        weight, bias = torch.randn(2, shape[1]).to(dtype)
        for given, added in ((residual, bias), (strided(residual), None)):
            out = torch.full(shape, math.nan, dtype=dtype)
            args = (x, given, weight, added, 1e-5, out)
            yield Case(args, _tolerance(dtype), ("residual", "out"))
