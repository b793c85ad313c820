"""Pools of more than 2^31 elements: what stands in the last blocks is found as in the first ones.

The pool is 16 GiB of addresses, of which only what is touched takes memory.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable

import pytest
import torch
from kernel_calls import Kernels, triton_kernels
from kernel_pools import int32, make_layout, make_plan, pool_view
from triton_device import HAS_TRITON

from vllm.ops.channel_delta_rule import channel_delta_rule
from vllm.ops.layout import StateTensor
from vllm.ops.linear_recurrence import gated_linear_recurrence
from vllm.ops.mlstm import mlstm
from vllm.ops.selective_scan import selective_scan
from vllm.ops.state_space import state_space_scan
from vllm.ops.wkv import wkv

BLOCK_BYTES, NUM_BLOCKS = 1 << 20, 1 << 14
FIRST, LAST = 3, NUM_BLOCKS - 1
TOKENS = 70

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="addresses without memory"
)


@pytest.fixture
def pool() -> torch.Tensor:
    """int8 [blocks, bytes]"""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES, flags=flags)
    pool = torch.frombuffer(memory, dtype=torch.int8).view(NUM_BLOCKS, BLOCK_BYTES)
    assert pool.numel() // 4 > 2**31
    return pool


def attention(kernels: Kernels, pool: torch.Tensor, block: int) -> list[torch.Tensor]:
    heads, size, dtype = 2, 16, torch.bfloat16
    cell = heads * 2 * size * dtype.itemsize
    cache = pool_view(pool, dtype, (8, 16, heads, 2 * size), (16 * cell, cell, 4 * size, 2))
    query, key, value = (torch.randn(TOKENS, n, size).to(dtype) for n in (4, heads, heads))
    kernels.write_kv(key, value, cache, torch.arange(TOKENS) + block * 8 * 16)
    layout = make_layout([TOKENS], [0])
    return [kernels.paged_attention(query, cache, int32([block])[None], layout, 0.25)]


def delta_rule(kernels: Kernels, pool: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Two steps, the second of which goes on from what the first one left."""
    dtype, width = torch.float32, 2 * 16 + 2 * 16
    inputs = pool_view(pool, dtype, (3, width), (4 * width, 4))
    states = pool_view(pool, dtype, (2, 16, 16), (1024, 64, 4), 1 << 16)
    weight, rates = torch.randn(width, 4), torch.zeros(2)
    found = []
    for context in (0, TOKENS):
        layout = make_layout([TOKENS], [context])
        plan = make_plan([block], [context > 0], [[(64, block - 1)]])
        x = torch.randn(TOKENS, width)
        x = kernels.causal_conv1d(x, weight, None, inputs, layout, plan)
        a, b = torch.randn(2, TOKENS, 2)
        found.append(kernels.gated_delta_rule(x, a, b, rates, rates, states, 1, layout, plan))
    return [*found, inputs[block].clone(), states[block].clone(), states[block - 1].clone()]


def delta_rule_in_chunks(kernels: Kernels, pool: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Likewise; steps that begin where a chunk does, and within one."""
    states = pool_view(pool, torch.float32, (2, 16, 16), (1024, 64, 4))
    kinds = kernels.delta_rule_pending(torch.bfloat16, 1, 2, 16, 16)
    pending = [
        pool_view(pool, kind.dtype, kind.shape, _strides(kind), (place + 1) << 16)
        for place, kind in enumerate(kinds)
    ]
    rates, context, found = torch.zeros(2, dtype=torch.bfloat16), 0, []
    for tokens in (64, 2 * TOKENS, 2 * TOKENS):
        layout = make_layout([tokens], [context])
        plan = make_plan([block], [context > 0], [[(64, block - 1)]])
        x = torch.randn(tokens, 4 * 16).bfloat16()
        a, b = torch.randn(2, tokens, 2).bfloat16()
        found.append(
            kernels.gated_delta_rule(x, a, b, rates, rates, states, 1, layout, plan, pending)
        )
        context += tokens
    bits = states.view(torch.int32)  # which not every kernel keeps as floats
    return [*found, bits[block].clone(), bits[block - 1].clone()]


def _strides(kind: StateTensor) -> tuple[int, ...]:
    """In bytes, of a dense tensor."""
    return tuple(s * kind.dtype.itemsize for s in torch.empty(kind.shape, device="meta").stride())


def heads(kernels: Kernels, pool: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Mamba-2, and the delta rule with decays by channel."""
    layout, plan = make_layout([TOKENS], [0]), make_plan([block], [True], [[(64, block - 1)]])
    head_states = pool_view(pool, torch.float32, (2, 8, 8), (256, 32, 4))
    xbc, dt, per_head = torch.randn(TOKENS, 32), torch.randn(TOKENS, 2), torch.randn(2)
    head_states[block] = torch.randn(2, 8, 8)
    scanned = torch.empty(TOKENS, 2, 8)
    args = (xbc, dt, per_head, per_head, per_head, 1, 0.0, math.inf, layout, plan)
    kernels._run(state_space_scan, *args, head_states, [], scanned)
    memory = pool_view(pool, torch.float32, (2, 8, 8), (256, 32, 4), 1 << 17)
    memory[block] = torch.randn(2, 8, 8)
    qkv, decays, out = torch.randn(TOKENS, 48), -torch.rand(TOKENS, 16), torch.empty(TOKENS, 2, 8)
    kernels._run(channel_delta_rule, qkv, decays, dt, layout, plan, memory, out)
    states = [view[n].clone() for view in (head_states, memory) for n in (block, block - 1)]
    return [scanned, out, *states]


def scans(kernels: Kernels, pool: torch.Tensor, block: int) -> list[torch.Tensor]:
    channels = 32
    layout, plan = make_layout([TOKENS], [0]), make_plan([block], [True], [[(64, block - 1)]])
    wide = pool_view(pool, torch.float32, (8, channels), (4 * channels, 4), 1 << 17)
    flat = pool_view(pool, torch.float32, (channels,), (4,), 1 << 18)
    wide[block], flat[block] = torch.randn(8, channels), torch.randn(channels)
    x, step, gate = torch.randn(3, TOKENS, channels)
    b, c = torch.randn(2, TOKENS, 1, 8)
    rates, bias = -torch.rand(8, channels), torch.randn(channels)
    scanned, out = torch.empty(2, TOKENS, channels)
    args = (x, step, b, c, gate, rates, bias, bias, layout, plan)
    kernels._run(selective_scan, *args, wide, scanned)
    kernels._run(gated_linear_recurrence, x, step, gate, rates[0], layout, plan, flat, out)
    states = [view[index].clone() for view in (wide, flat) for index in (block, block - 1)]
    mean = pool_view(pool, torch.float32, (3, channels), (4 * channels, 4), 3 << 17)
    averaged = torch.empty_like(x)
    kernels._run(wkv, x, step, gate, rates[0], bias, layout, plan, mean, averaged)
    memory = pool_view(pool, torch.float32, (2, 4, 8), (128, 32, 4), 1 << 16)
    row = pool_view(pool, torch.float32, (2, 4), (16, 4), 1 << 15)
    number = pool_view(pool, torch.float32, (2,), (4,), 1 << 14)
    read = torch.empty(TOKENS, 2, 8)
    caches = (memory, row, number)
    kernels._run(mlstm, x, gate[:, :4], 15.0, 1e-6, layout, plan, *caches, read)
    states += [v[index].clone() for v in (mean, *caches) for index in (block, block - 1)]
    return [scanned, out, averaged, read, *states]


def captured_rows(kernels: Kernels, pool: torch.Tensor, block: int) -> list[torch.Tensor]:
    hidden = torch.randn(5, 64)
    cache = pool_view(pool, torch.float32, (100, 3, 64), (3 * 256, 256, 4))
    kernels.capture_rows(cache, torch.arange(5) + block * 100, 1, hidden, hidden)
    assert torch.equal(cache[block, :5, 1], 2 * hidden)
    return [cache[block, :5].clone()]


def copied_block(kernels: Kernels, pool: torch.Tensor, block: int) -> list[torch.Tensor]:
    pool[block, ::1024] = 7
    kernels.copy_blocks(pool, torch.tensor([block]), torch.tensor([block - 1]))
    return [pool[block - 1].clone()]


WORK: dict[str, Callable[[Kernels, torch.Tensor, int], list[torch.Tensor]]] = {
    work.__name__: work
    for work in (
        *(attention, delta_rule, delta_rule_in_chunks, heads, scans),
        *(captured_rows, copied_block),
    )
}


def compare_first_and_last_blocks(work: str, kernels: Kernels, pool: torch.Tensor) -> None:
    results = []
    for block in (FIRST, LAST):
        torch.manual_seed(5)
        results.append(WORK[work](kernels, pool, block))
    for first, last in zip(*results, strict=True):
        assert first.float().isfinite().all() and torch.equal(first, last)


@pytest.mark.parametrize("work", WORK)
def test_native(work: str, kernels: Kernels, pool: torch.Tensor) -> None:
    compare_first_and_last_blocks(work, kernels, pool)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("work", WORK)
def test_triton(work: str, pool: torch.Tensor) -> None:
    compare_first_and_last_blocks(work, triton_kernels(), pool)
