"""Memory in large pages."""

from __future__ import annotations

import pytest
import torch

from vllm.utils import host_memory
from vllm.utils.host_memory import HUGE_PAGE_BYTES, in_large_pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int16])
@pytest.mark.parametrize("rows", [3, 1200])
def test_a_copy_in_large_pages_is_dense_and_the_same(dtype: torch.dtype, rows: int) -> None:
    view = torch.arange(rows * 1030).to(dtype).view(rows, 1030).t()[1:, ::2]
    copy = in_large_pages(view)
    assert torch.equal(copy, view) and copy.is_contiguous()
    assert copy.data_ptr() != view.data_ptr()
    if rows == 1200 and dtype is torch.float32:
        assert copy.nbytes > HUGE_PAGE_BYTES  # so that both ways are tried


def test_a_copy_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "total_memory_bytes", lambda: 2**20)
    with pytest.raises(ValueError, match=r"a weight of 4\.00 MiB cannot be had"):
        in_large_pages(torch.zeros(2**20))
