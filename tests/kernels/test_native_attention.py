"""Features of the native attention alone: partitions of 1,024 keys, packed keys that many rows
share (from 4,096 rows of a request and kv head on), and its limits."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_calls import Kernels, native_kernels, plain_kernels
from kernel_pools import PAGE_TOKENS, AttentionPool, make_layout
from kernel_steps import AttentionRun, Schedule, some_sinks

from tests.grids import at_night

LENGTH = 2200
"""Tokens of a request whose keys lie in three partitions."""

TAIL = 21
"""Tokens at its end that are looked at."""


@pytest.fixture
def kernels(native: Kernels) -> Kernels:
    return native


def _requests(
    dtype: torch.dtype, heads: int, kv_heads: int, head_size: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    requests = []
    for tokens in (LENGTH, 30):
        key, value = torch.randn(2, tokens, kv_heads, head_size).to(dtype)
        requests.append((torch.randn(tokens, heads, head_size).to(dtype), key, value))
    return requests


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "window", "soft_cap"),
    [(2, 1, 24, None, None), at_night(6, 2, 32, 1300, None), (6, 2, 32, 1300, 4.0)],
)
def test_partitions_merge_to_the_same_bits(
    kernels: Kernels,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_size: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """With a soft cap and sinks, and without both."""
    sinks = torch.full((heads,), float("-inf")) if soft_cap is None else some_sinks(heads)
    scoring = (None, None) if soft_cap is None else (soft_cap, sinks)
    requests = _requests(dtype, heads, kv_heads, head_size)
    # Few rows and many keys: on two threads the partitions are handed out one by one.
    ends: list[Schedule] = [
        [[(0, TAIL)]],
        [[(0, 1)] for _ in range(TAIL)],
        [[(0, 5), (1, 30)], [(0, 16)]],
    ]
    whole = AttentionRun(kernels, requests, 5, window, 0, *scoring).run([[(0, LENGTH)]])[0]
    for threads, (seed, end) in itertools.product((1, 2), enumerate(ends)):
        torch.set_num_threads(threads)
        run = AttentionRun(kernels, requests, 3, window, seed, *scoring)
        out = run.run([[(0, 1000)], [(0, LENGTH - TAIL - 1000)], *end])[0]
        assert torch.equal(out, whole), f"{threads} threads, schedule {seed}"
    query, key, value = (part.double() for part in requests[0])
    for position in (0, 63, 64, 1023, 1024, LENGTH - 1):
        low = 0 if window is None else max(0, position - window + 1)
        keys, values = (
            x[low : position + 1].repeat_interleave(heads // kv_heads, 1) for x in (key, value)
        )
        scores = torch.einsum("hd,khd->hk", query[position], keys) * 2 * head_size**-0.5
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1)[:, :-1], values)
        tolerance = 1e-5 if dtype is torch.float32 else 2.0**-7 if dtype is torch.bfloat16 else 2e-3
        torch.testing.assert_close(
            whole[position].double(), expected, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("poison", [float("nan"), at_night(float("inf"))])
@pytest.mark.parametrize(
    ("heads", "tokens", "bad"),
    # Of 1,153 tokens the first one's rows are an item, and items end behind odd numbers of keys.
    [(4, 150, 70), (8, 1153, 1), (8, 1153, 255), (8, 1153, 256), (8, 1153, 1057), (8, 1153, 1152)],
)
def test_a_value_that_is_not_finite_stays_out_of_earlier_tokens(
    kernels: Kernels,
    dtype: torch.dtype,
    heads: int,
    tokens: int,
    bad: int,
    poison: float,
) -> None:
    """Also where it lies in a tile that all rows share."""
    _check_a_value_stays_out_of_earlier_tokens(kernels, dtype, heads, tokens, bad, poison)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_it_does_so_in_the_body(poison: float) -> None:
    _check_a_value_stays_out_of_earlier_tokens(plain_kernels(), torch.float32, 4, 150, 70, poison)


def _check_a_value_stays_out_of_earlier_tokens(
    kernels: Kernels, dtype: torch.dtype, heads: int, tokens: int, bad: int, poison: float
) -> None:
    query, key, value = _requests(dtype, heads, 2, 40)[0]
    window = 33
    clean = [(query[:tokens], key[:tokens], value[:tokens])]
    spoilt = value[:tokens].clone()
    spoilt[bad, 1, 7] = poison
    for asked in (None, window):
        expected = AttentionRun(kernels, clean, 1, asked).run([[(0, tokens)]])[0]
        run = AttentionRun(kernels, [(query[:tokens], key[:tokens], spoilt)], 1, asked)
        out = run.run([[(0, tokens)]])[0]
        reached = torch.zeros_like(out, dtype=torch.bool)
        reached[bad : tokens if asked is None else bad + window, heads // 2 :, 7] = True
        assert not torch.isfinite(out[reached]).any()
        assert torch.equal(out[~reached], expected[~reached])


def test_keys_beyond_the_memory_for_shared_ones() -> None:
    """The first request's tiles fit, 5 MiB a head, of the second one's three in five; cut in
    two, it shares none."""
    kernels = native_kernels()
    kv_heads, tokens, head_size = 8, 1100, 1024
    query = torch.randn(tokens, 4 * kv_heads, head_size).to(torch.bfloat16)
    key, value = torch.randn(2, tokens, kv_heads, head_size).to(torch.bfloat16)
    run = AttentionRun(kernels, [(query, key, value)] * 2, 5, None)
    together = run.run([[(0, tokens), (1, tokens)]])
    run = AttentionRun(kernels, [(query, key, value)], 5, None)
    cut = run.run([[(0, 900)], [(0, 200)]])[0]
    assert torch.isfinite(cut).all()
    for out in together:
        assert torch.equal(out, cut)


def test_bfloat16_is_as_near_as_torch(kernels: Kernels) -> None:
    heads, tokens, head_size = 4, 700, 64
    query, key, value = torch.randn(3, tokens, heads, head_size).to(torch.bfloat16)
    run = AttentionRun(kernels, [(query, key, value)], 5, None)
    out = run.run([[(0, tokens)]])[0]
    scale = 2 * head_size**-0.5
    heads_first = [x.transpose(0, 1) for x in (query, key, value)]

    def torch_attention(parts: list[torch.Tensor]) -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*(x[None] for x in parts), is_causal=True, scale=scale)[0].transpose(0, 1)

    exact = torch_attention([x.double() for x in heads_first])
    theirs = torch_attention(heads_first)
    assert (out - exact).norm() <= 1.02 * (theirs - exact).norm()


def test_entries_of_the_block_table_are_checked(kernels: Kernels) -> None:
    pool = AttentionPool(torch.float32, 1, 8, 1, num_blocks=3)
    query = torch.randn(1, 1, 8)
    for block in (3, -1):
        table = torch.tensor([[block]], dtype=torch.int32)
        with pytest.raises(RuntimeError, match="outside of its tensor"):
            kernels.paged_attention(query, pool.kv_cache, table, make_layout([1], [4]), 1.0)


def test_entries_of_the_block_table_are_checked_where_keys_are_shared(
    kernels: Kernels,
) -> None:
    tokens = 4100
    blocks = -(-tokens // PAGE_TOKENS)
    pool = AttentionPool(torch.float32, 1, 8, 1, num_blocks=blocks)
    query = torch.randn(tokens, 1, 8)
    for index, block in ((0, -1), (blocks - 1, blocks)):
        table = torch.arange(blocks, dtype=torch.int32)[None]
        table[0, index] = block
        layout = make_layout([tokens], [tokens])
        with pytest.raises(RuntimeError, match="outside of its tensor"):
            kernels.paged_attention(query, pool.kv_cache, table, layout, 1.0)
