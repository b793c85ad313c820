"""A device makes the report on rows that the plain kernels make, in one pass."""

from __future__ import annotations

import sys

import pytest
import torch
from kernel_calls import plain_kernels

from vllm.ops.row_transport import DeviceRows, RowReport, make_row_transport


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("row", "column", "value"), [(0, 0, float("nan")), (4, 2, float("inf")), (3, 1, 0.0)]
)
def test_bad_cells(row: int, column: int, value: float, dtype: torch.dtype) -> None:
    rows = torch.randn(5, 3, 7).to(dtype)
    assert DeviceRows().inspect(rows).result() == RowReport(-1, -1, -1, -1)
    if value == 0:
        rows[row, column] = value
    else:
        rows[row, column, 6] = value
    later = rows.clone()
    later[4, 2] = rows[row, column]
    for case in (rows, later):
        report = DeviceRows().inspect(case).result()
        assert report == plain_kernels().inspect_rows(case).result()
        assert not report.is_good
        assert (row, column) in (report[:2], report[2:])


def test_no_rows() -> None:
    assert DeviceRows().inspect(torch.empty(0, 2, 8)).result().is_good


def test_rows_leave_where_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("vllm.ops.cuda")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    transport = make_row_transport(torch.device("cuda"))
    assert not transport.inspect(torch.zeros(1, 1, 4)).result().is_good


@pytest.mark.gpu
def test_rows_travel_while_the_device_works_on(dtype: torch.dtype) -> None:
    """Nobody waits, and the pool may be written by what is queued next."""
    transfer = DeviceRows()
    wanted = torch.randn(40, 3, 2048).to(dtype)
    wanted[31, 2] = 0
    wanted[17, 1, 5] = float("inf")
    slots = torch.randperm(64)[:40]
    cache = torch.full((8, 8, 3, 2048), float("nan"), dtype=dtype, device="cuda")
    kept = torch.empty_like(cache)
    cache[slots.cuda() // 8, slots.cuda() % 8] = wanted.cuda()
    kept.copy_(cache)
    places = slots.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pieces = []
        for _ in range(20):
            out = torch.empty(wanted.shape, dtype=dtype, pin_memory=True)
            pieces.append((out, transfer.gather(cache, places, out)))
            cache.fill_(float("nan"))
            cache.copy_(kept)
        results = [(out, report.result()) for out, report in pieces]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for out, report in results:
        assert report == RowReport(17, 1, 31, 2)
        assert torch.equal(out, wanted)
