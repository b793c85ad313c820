"""Memory in large pages."""

from __future__ import annotations

import pytest
import torch

from vllm.utils import host_memory
from vllm.utils.host_memory import HUGE_PAGE_BYTES, empty_in_large_pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16])
@pytest.mark.parametrize("rows", [3, 1200])
def test_memory_in_large_pages_is_dense(dtype: torch.dtype, rows: int) -> None:
    first, second = (
        empty_in_large_pages((rows, 1030), dtype, torch.device("cpu")) for _ in range(2)
    )
    assert first.is_contiguous() and (first.shape, first.dtype) == ((rows, 1030), dtype)
    first.fill_(1), second.fill_(2)
    assert (first == 1).all() and (second == 2).all()
    if rows == 1200 and dtype is torch.float32:
        assert first.nbytes > HUGE_PAGE_BYTES  # so that both ways are tried


def test_memory_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "total_memory_bytes", lambda: 2**20)
    with pytest.raises(ValueError, match=r"a weight of 4\.00 MiB cannot be allocated"):
        empty_in_large_pages((2**20,), torch.float32, torch.device("cpu"))
