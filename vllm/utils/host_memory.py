"""Host memory that the kernel hands out in large pages, filled with zeros until it is written."""

from __future__ import annotations

import errno
import math
import mmap
import os
from contextlib import suppress

import torch

from vllm.utils.mem_utils import available_memory_bytes, format_bytes, total_memory_bytes

HUGE_PAGE_BYTES = 2 * 2**20
_PAGE_BYTES = 4096


def allocate_host_bytes(
    num_bytes: int, what: str, advice: str, *, touched: bool = False
) -> torch.Tensor:
    """Allocate int8 [num_bytes]; memory is taken when it is touched, if possible in large pages.

    Touching a block or a state then costs one page fault; with small pages it costs hundreds.
    ``touched``: all of it is taken here, so that nothing waits for that later. ValueError:
    ``what`` cannot be allocated, with ``advice``.
    """
    if num_bytes < HUGE_PAGE_BYTES:
        return torch.empty(num_bytes, dtype=torch.int8)
    limit = available_memory_bytes() if touched else total_memory_bytes()
    try:
        if num_bytes > limit:  # mmap would succeed, but filling the memory would end the process
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _refused(num_bytes, what, advice, error.strerror) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # kernels without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.int8)
    if touched:
        tensor[::_PAGE_BYTES] = 0
    return tensor


def empty_in_large_pages(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Like ``torch.empty``, for tensors that are read from memory again and again.

    They lie one after another in adjacent pages of one kind, so a large page may hold the end of
    one tensor and the beginning of the next. torch's own allocations leave a sixth of weights of a
    few MiB in small pages. These cost the CPU more address look-ups, and its prefetching ends with
    each of them.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = allocate_host_bytes(num_bytes, "a weight", "use a smaller model")
    return memory.view(dtype).view(shape)


def allocate_pinned_bytes(num_bytes: int, what: str, advice: str) -> torch.Tensor:
    """Allocate int8 [num_bytes] that a card copies from and to by itself. ValueError: as above."""
    try:
        if num_bytes > available_memory_bytes():
            raise RuntimeError(os.strerror(errno.ENOMEM))
        return torch.empty(num_bytes, dtype=torch.int8, pin_memory=True)
    except RuntimeError as error:
        raise _refused(num_bytes, what, advice, str(error)) from error


def _refused(num_bytes: int, what: str, advice: str, reason: str | None) -> ValueError:
    return ValueError(
        f"{what} of {format_bytes(num_bytes)} cannot be allocated ({reason}); "
        f"{format_bytes(available_memory_bytes())} are available: {advice}"
    )
