"""Cases of GELU as a gate."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from kernel_pools import strided
from operation_cases import Case, cases


@cases
def gelu_tanh_and_mul(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((0, 8), (1, 2), (3, 66), (17, 200)):
        x = 3 * torch.randn(shape).to(dtype)
        for given in (x, strided(x)):
            yield Case((given, torch.full((shape[0], shape[1] // 2), math.nan, dtype=dtype)), 2e-6)
