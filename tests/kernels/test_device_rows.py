"""What a device says of rows: the report that the plain kernels make, in one pass there."""

from __future__ import annotations

import pytest
import torch

from vllm.kernels.base import RowReport
from vllm.kernels.device_rows import inspect_rows
from vllm.kernels.plain import PlainKernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("row", "column", "value"), [(0, 0, float("nan")), (4, 2, float("inf")), (3, 1, 0.0)]
)
def test_bad_cells(row: int, column: int, value: float, dtype: torch.dtype) -> None:
    rows = torch.randn(5, 3, 7).to(dtype)
    assert inspect_rows(rows).result() == RowReport(-1, -1, -1, -1)
    if value == 0:
        rows[row, column] = value
    else:
        rows[row, column, 6] = value
    later = rows.clone()
    later[4, 2] = rows[row, column]
    for case in (rows, later):
        report = inspect_rows(case).result()
        assert report == PlainKernels().inspect_rows(case).result()
        assert not report.is_good
        assert (row, column) in (report[:2], report[2:])


def test_no_rows() -> None:
    assert inspect_rows(torch.empty(0, 2, 8)).result().is_good
