"""Attention through FlashInfer's paged wrappers, planned once per step and kind of layer.

FlashInfer addresses pages by one stride. The pool's pages lie at ``block * block_stride +
page * page_stride``, so pages for FlashInfer are counted in units of the common divisor of the two
strides. They are overlapping views of the pool, and tables name only whole pages.

The bits of a row may depend on the batch, because FlashInfer chooses its tiles by the batch.
"""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import torch

from vllm.ops.cuda.triton_attention import paged_attention as triton_paged_attention
from vllm.ops.layout import SequenceLayout
from vllm.utils.transfers import pinned_for, to_device

HEAD_SIZES = (64, 128, 256)
WORKSPACE_BYTES = 256 * 2**20


class PagePlan(NamedTuple):
    """The pages that the requests of a step read. All but ``indices`` are on the host. int32."""

    query_indptr: torch.Tensor
    """[requests + 1]"""
    indptr: torch.Tensor
    """[requests + 1], offsets into ``indices``."""
    indices: torch.Tensor
    """[pages], in units of :func:`page_unit`."""
    last_page_len: torch.Tensor
    """[requests], tokens in the last page of each request."""


def page_unit(kv_cache: torch.Tensor) -> int:
    """Largest number of elements that divides the distances of blocks and of pages."""
    return math.gcd(kv_cache.stride(0), kv_cache.stride(1))


def plan_pages(
    layout: SequenceLayout,
    block_table: torch.Tensor,
    kv_cache: torch.Tensor,
    sliding_window: int | None,
) -> PagePlan:
    """Plan the pages of every request. Waits for the device only if ``layout`` is not on the host.

    Pages before the window of a request's first query are left out: the wrappers count
    positions from the end. The blocks that their table entries name may hold anything, even NaN.
    """
    query_start, seq_lens = layout.on_host()
    _, pages_per_block, page_tokens, _, _ = kv_cache.shape
    first_page = torch.zeros_like(seq_lens)
    if sliding_window is not None:
        first_query = seq_lens - query_start.diff()
        first_page = (first_query - sliding_window + 1).clamp_min(0) // page_tokens
    num_pages = (seq_lens + page_tokens - 1) // page_tokens
    last_page_len = seq_lens - page_tokens * (num_pages - 1).clamp_min(0)
    num_pages -= first_page
    indptr = seq_lens.new_zeros(len(seq_lens) + 1)
    indptr[1:] = num_pages.cumsum(0)
    request = torch.repeat_interleave(num_pages)
    page = torch.arange(len(request), device=request.device) + (first_page - indptr[:-1])[request]
    device, unit = block_table.device, page_unit(kv_cache)
    request, page = to_device(request.numpy(), device), to_device(page.numpy(), device)
    block = block_table[request, page // pages_per_block].long()
    indices = block * (kv_cache.stride(0) // unit)
    indices += page % pages_per_block * (kv_cache.stride(1) // unit)
    query_start, indptr, last_page_len = (
        pinned_for(device, part) for part in (query_start, indptr, last_page_len)
    )
    return PagePlan(query_start, indptr, indices.int(), last_page_len)


def page_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each [units, page_tokens, kv_heads, head_size], overlapping."""
    blocks, pages, page_tokens, kv_heads, content = kv_cache.shape
    unit = page_unit(kv_cache)
    last = (blocks - 1) * kv_cache.stride(0) + (pages - 1) * kv_cache.stride(1)
    view = kv_cache.as_strided(
        (last // unit + 1, page_tokens, kv_heads, content), (unit, *kv_cache.stride()[2:])
    )
    keys, values = view.chunk(2, dim=-1)
    return keys, values


class _Kind(NamedTuple):
    """The properties of a layer that a plan depends on within one step."""

    block_table: int
    """Address of the table."""
    num_heads: int
    head_size: int
    cache_shape: torch.Size
    cache_strides: tuple[int, ...]
    dtype: torch.dtype
    scale: float
    sliding_window: int | None
    soft_cap: float | None


class FlashInferAttention(threading.local):
    """Attention through FlashInfer. Each thread, hence each engine, has its own plans and
    workspace."""

    def __init__(self) -> None:
        self._layout: SequenceLayout | None = None
        self._planned: dict[_Kind, Any] = {}
        self._planned_before: list[Any] = []  # in the step before this one
        self._copied: dict[Any, torch.cuda.Event] = {}
        self._wrappers: dict[type, list[Any]] = {}
        self._workspace: torch.Tensor | None = None

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        layout: SequenceLayout,
        scale: float,
        value_offset: int,
        sliding_window: int | None,
        chunk_size: int | None,
        soft_cap: float | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """See :func:`vllm.ops.attention.paged_attention`.

        Recorded steps, which cannot be planned anew, go through the Triton kernel.
        ``vllm.ops.backends`` has refused everything that FlashInfer does not support.
        """
        if layout.is_recorded:
            arguments = (query, kv_cache, block_table, layout, scale, value_offset, sliding_window)
            triton_paged_attention(*arguments, chunk_size, soft_cap, sinks, out)
            return
        assert query.dtype is not torch.float32 and query.shape[2] in HEAD_SIZES
        assert sinks is None and chunk_size is None
        assert query.shape == out.shape and value_offset == query.shape[2]
        if layout is not self._layout:
            self._planned_before = list(self._planned.values())
            self._planned.clear()
            self._layout = layout
        table, _, heads, size = block_table.data_ptr(), *query.shape
        cache = (kv_cache.shape, kv_cache.stride(), query.dtype)
        kind = _Kind(table, heads, size, *cache, scale, sliding_window, soft_cap)
        if kind not in self._planned:
            pages = plan_pages(layout, block_table, kv_cache, sliding_window)
            wrapper = self._plan(kind, pages, query.device)
            self._planned[kind] = wrapper
            if query.is_cuda:
                self._copied[wrapper] = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                self._copied[wrapper].record()
        self._planned[kind].run(query, page_views(kv_cache), out=out)

    def _plan(self, kind: _Kind, pages: PagePlan, device: torch.device) -> Any:
        """Plan a wrapper for this kind of layer in this step, and return it."""
        import flashinfer

        assert self._layout is not None
        _, _, page_tokens, kv_heads, _ = kind.cache_shape
        window_left = -1 if kind.sliding_window is None else kind.sliding_window - 1
        common: dict[str, Any] = {
            "page_size": page_tokens,
            "window_left": window_left,
            "sm_scale": kind.scale,
            "logits_soft_cap": kind.soft_cap,
            "q_data_type": kind.dtype,
            "kv_data_type": kind.dtype,
        }
        heads = (kind.num_heads, kv_heads, kind.head_size)
        if self._layout.max_query_len == 1:
            wrapper = self._free_wrapper(flashinfer.BatchDecodeWithPagedKVCacheWrapper, device)
            wrapper.plan(pages.indptr, pages.indices, pages.last_page_len, *heads, **common)
        else:
            wrapper = self._free_wrapper(flashinfer.BatchPrefillWithPagedKVCacheWrapper, device)
            wrapper.plan(*pages, *heads, causal=True, **common)
        return wrapper

    def _free_wrapper(self, wrapper_class: type, device: torch.device) -> Any:
        """A wrapper without a plan of this step or the last; all share one workspace for results.

        A plan is copied to the card from the wrapper's own host memory, and the copy of the
        previous step may not be done yet.
        """
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrappers = self._wrappers.setdefault(wrapper_class, [])
        busy = [*self._planned.values(), *self._planned_before]
        for wrapper in wrappers:
            if all(wrapper is not other for other in busy):
                if wrapper in self._copied:
                    self._copied[wrapper].synchronize()
                return wrapper
        options = {"use_tensor_cores": True} if "Decode" in wrapper_class.__name__ else {}
        wrappers.append(wrapper_class(self._workspace, "NHD", **options))
        return wrappers[-1]
