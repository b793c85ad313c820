"""Attention on a card, in sizes that only a card can do. Run by ``-m gpu``."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from kernel_calls import Kernels, one_other, triton_kernels
from kernel_pools import make_layout
from kernel_steps import AttentionRun, Schedule, in_chunks
from torch.nn import functional
from triton_device import HAS_TRITON

from vllm.ops import attention
from vllm.ops.backends import get_paged_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("card_or_interpreter")]

LENGTHS = (5000, 300, 2049)
Request = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _backend(name: str) -> Kernels:
    """The kernels with the attention of one backend."""
    return one_other(attention.paged_attention, get_paged_attention("cuda", name))


BACKENDS = [
    pytest.param("TRITON_ATTN", marks=pytest.mark.skipif(not HAS_TRITON, reason="no Triton")),
    pytest.param(
        "FLASHINFER",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("flashinfer") is None, reason="no FlashInfer"
        ),
    ),
]


def _requests(heads: int, kv_heads: int, head_size: int) -> list[Request]:
    requests = []
    for tokens in LENGTHS:
        key, value = torch.randn(2, tokens, kv_heads, head_size).bfloat16()
        requests.append((torch.randn(tokens, heads, head_size).bfloat16(), key, value))
    return requests


def _expected(request: Request, window: int | None) -> torch.Tensor:
    query, key, value = (x.float().transpose(0, 1)[None] for x in request)
    position = torch.arange(query.shape[2])
    mask = position[None, :] <= position[:, None]
    if window is not None:
        mask &= position[None, :] > position[:, None] - window
    scale = 2.0 * query.shape[-1] ** -0.5
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


SHAPES = [(32, 8, 128, None), (16, 4, 256, None), (8, 8, 64, 1000), (12, 2, 96, None)]
TOGETHER: Schedule = [
    [(0, 1000), (1, 300), (2, 2048)],
    [(0, 3990), (2, 1)],
    *([(0, 1)] for _ in range(10)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "window"), SHAPES)
def test_values(
    heads: int, kv_heads: int, head_size: int, window: int | None, backend: str
) -> None:
    requests = _requests(heads, kv_heads, head_size)
    kernels = _backend(backend)
    for r, out in enumerate(AttentionRun(kernels, requests, 9, window).run(TOGETHER)):
        torch.testing.assert_close(
            out.float(), _expected(requests[r], window), atol=0.02, rtol=0.02
        )


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize(("heads", "kv_heads", "head_size", "window"), SHAPES)
def test_prefill_chunks_and_decode_give_the_same_bits(
    heads: int, kv_heads: int, head_size: int, window: int | None
) -> None:
    requests = _requests(heads, kv_heads, head_size)
    kernels = _backend("TRITON_ATTN")

    def run(schedule: Schedule) -> torch.Tensor:
        return AttentionRun(kernels, requests, 9, window, len(schedule)).run(schedule)[0]

    whole = run(in_chunks(LENGTHS[0], LENGTHS[0]))
    assert torch.equal(run(TOGETHER), whole)
    assert torch.equal(run(in_chunks(LENGTHS[0], 777)), whole)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_nothing_waits_for_the_device(request: pytest.FixtureRequest) -> None:
    kernels = triton_kernels()
    run = AttentionRun(kernels, _requests(8, 2, 128), 3, None)
    run.write([(0, 70), (1, 20)])
    table = torch.tensor([run.tables[0], run.tables[0]], dtype=torch.int32)
    query, key = torch.randn(90, 8, 128).bfloat16(), torch.randn(90, 2, 128).bfloat16()
    slots, hidden = torch.arange(90), torch.randn(90, 512).bfloat16()
    rows, cos_sin = torch.zeros(9, 16, 2, 512).bfloat16(), torch.randn(100, 128)
    weight = torch.ones(512).bfloat16()
    layout, ones = make_layout([70, 20], [0, 0]), torch.ones(4, 512).bfloat16()
    request.getfixturevalue("no_waiting")
    kernels.rotary_embedding(slots, query, key, cos_sin, False)
    kernels.write_kv(key, key, run.pool.kv_cache, slots)
    kernels.paged_attention(query, run.pool.kv_cache, table, layout, 0.1)
    kernels.capture_rows(rows, slots, 1, hidden, hidden)
    kernels.add_rms_norm(hidden, hidden, weight, 1e-6)
    kernels.silu_and_mul(hidden)
    kernels.linear(hidden, ones)
