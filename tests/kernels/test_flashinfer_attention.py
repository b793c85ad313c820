"""Plans of the pool for FlashInfer, and when they are made; a stand-in replaces the library."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import kernel_reference as reference
import pytest
import torch
from kernel_calls import Kernels, one_other, triton_kernels
from kernel_pools import AttentionPool, int32, make_layout
from kernel_reference import HALF_ULP, assert_near
from kernel_steps import AttentionRun
from triton_device import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from tests.engine import fake_card
from vllm.ops import attention
from vllm.ops.cuda.flashinfer_attention import FlashInferAttention, page_views, plan_pages
from vllm.ops.layout import SequenceLayout


class Wrapper:
    """Attends like FlashInfer over the pages it was told, naively."""

    planned: ClassVar[list[Wrapper]] = []
    made = 0

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **options: bool) -> None:
        assert workspace.dtype is torch.uint8
        assert kv_layout == "NHD"
        assert options == ({"use_tensor_cores": True} if self.is_decode else {})
        type(self).made += 1

    is_decode = False

    def plan(
        self,
        query_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        page_size: int,
        window_left: int,
        sm_scale: float,
        logits_soft_cap: float | None,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert q_data_type is kv_data_type is torch.bfloat16
        for tensor in (query_indptr, indptr, indices, last_page_len):
            assert tensor.dtype is torch.int32
        self.pages = query_indptr.tolist(), indptr.tolist(), indices, last_page_len.tolist()
        self.heads = num_heads, num_kv_heads, head_size
        self.page_size, self.window_left, self.scale = page_size, window_left, sm_scale
        self.soft_cap = logits_soft_cap
        Wrapper.planned.append(self)

    def run(
        self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> None:
        query_start, starts, indices, last = self.pages
        window = None if self.window_left < 0 else self.window_left + 1
        for r, tokens in enumerate(last):
            own = slice(query_start[r], query_start[r + 1])
            mine = indices[starts[r] : starts[r + 1]].long()
            seq_len = (len(mine) - 1) * self.page_size + tokens
            keys, values = (part[mine].flatten(0, 1)[:seq_len].double() for part in cache)
            assert torch.isfinite(values).all()
            asked = query[own].double()
            scoring = (self.scale, window, self.soft_cap)
            out[own] = reference.attention(asked, keys, values, *scoring).to(out.dtype)


class DecodeWrapper(Wrapper):
    is_decode = True

    def plan(self, indptr: torch.Tensor, *rest: Any, **options: Any) -> None:
        one_each = torch.arange(len(indptr), dtype=torch.int32)
        super().plan(one_each, indptr, *rest, causal=True, **options)


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    names = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Wrapper,
        BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", names)
    Wrapper.planned = []
    Wrapper.made = DecodeWrapper.made = 0


def flashinfer_kernels() -> Kernels:
    return one_other(attention.paged_attention, FlashInferAttention().paged_attention)


@pytest.mark.parametrize(
    ("window", "pages", "soft_cap"), [(None, 1, None), (None, 5, 1.5), (33, 2, None), (5, 1, 0.7)]
)
def test_pages_of_a_step(window: int | None, pages: int, soft_cap: float | None) -> None:
    lengths, head_size = (150, 37, 90, 16), 64
    requests = []
    for tokens in lengths:
        key, value = torch.randn(2, tokens, 2, head_size).bfloat16()
        requests.append((torch.randn(tokens, 4, head_size).bfloat16(), key, value))
    run = AttentionRun(flashinfer_kernels(), requests, pages, window, soft_cap=soft_cap)
    steps = [[(0, 60), (2, 89), (3, 16)], [(0, 89), (1, 36)], [(2, 1), (0, 1), (1, 1)]]
    outputs = run.run(steps)
    for (query, key, value), out in zip(requests, outputs, strict=True):
        expected = reference.attention(
            query.double(), key.double(), value.double(), 2.0 * head_size**-0.5, window, soft_cap
        )
        assert_near(out, expected, torch.bfloat16, allowance=HALF_ULP[torch.bfloat16] * 0.1)
    assert [wrapper.is_decode for wrapper in Wrapper.planned] == [False, False, True]


def _step() -> tuple[AttentionPool, torch.Tensor, torch.Tensor, SequenceLayout]:
    pool = AttentionPool(torch.bfloat16, 1, 64, 3, num_blocks=4)
    pool.pool.zero_()
    query = torch.randn(20, 2, 64).bfloat16()
    return pool, query, int32([1]).view(1, 1), make_layout([20], [0])


def test_planned_once_for_all_layers_of_a_kind_and_step() -> None:
    pool, query, table, layout = _step()
    attend = flashinfer_kernels().paged_attention
    for _ in range(3):
        attend(query, pool.kv_cache, table, layout, 1.0)
        attend(query, pool.kv_cache, table, layout, 1.0, 7)
        attend(query, pool.kv_cache, table, layout, 1.0, 7, 30.0)
    assert len(Wrapper.planned) == Wrapper.made == 3
    for step in range(4):  # the plan of the step before may still be on its way to the card
        attend(query, pool.kv_cache, table, make_layout([20], [0]), 1.0)
        assert len(Wrapper.planned) == 4 + step
        assert Wrapper.made == 4


class OnCard(torch.Tensor):
    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def test_who_waits_for_an_earlier_plan_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory on the host is written anew two steps later."""
    waited = []

    class Event(fake_card._Event):
        def synchronize(self) -> None:
            super().synchronize()  # an error, were it not blocking
            waited.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    pool, query, table, _ = _step()
    attend = flashinfer_kernels().paged_attention
    for _ in range(4):
        attend(query.as_subclass(OnCard), pool.kv_cache, table, make_layout([20], [0]), 1.0)
    assert Wrapper.made == 2 and len(waited) == 2


@pytest.mark.usefixtures("card_or_interpreter")
def test_recorded_steps_go_elsewhere() -> None:
    """To the Triton kernel, which needs no plan."""
    pool, query, table, layout = _step()
    pool.kv_cache[1].normal_()
    arguments = (query, pool.kv_cache, table, replace(layout, is_recorded=True), 1.0, 7, 1.5)
    out = flashinfer_kernels().paged_attention(*arguments)
    assert torch.equal(out, triton_kernels().paged_attention(*arguments))
    assert not Wrapper.planned


def test_lengths_on_the_host_are_not_asked_for_again() -> None:
    pool, _, table, layout = _step()
    meta = SequenceLayout(
        layout.query_start.to("meta"),
        layout.seq_lens.to("meta"),
        layout.max_query_len,
        layout.max_seq_len,
        query_start_host=layout.query_start,
        seq_lens_host=layout.seq_lens,
    )
    plan = plan_pages(meta, table, pool.kv_cache, None)
    assert plan.indptr.tolist() == [0, 2]
    assert plan.last_page_len.tolist() == [4]


@pytest.mark.parametrize("heads_first", [False, True])
def test_views_cover_the_pool_and_no_more(heads_first: bool) -> None:
    pool = AttentionPool(torch.bfloat16, 3, 64, 5, num_blocks=7, heads_first=heads_first)
    cache = pool.kv_cache
    cache[:] = torch.randn(cache.shape).bfloat16()
    keys, values = page_views(cache)
    layout, table = make_layout([80], [0]), int32([6]).view(1, 1)
    pages = plan_pages(layout, table, cache, None).indices
    assert torch.equal(keys[pages.long()], cache[6, ..., :64])
    assert torch.equal(values[pages.long()], cache[6, ..., 64:])
