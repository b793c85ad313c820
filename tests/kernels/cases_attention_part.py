"""Cases of attention over a rank's part of the tokens: queries that see none of them, odd sizes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from kernel_pools import AttentionPool, make_layout, poisoned, strided
from operation_cases import Case, cases

from vllm.utils.token_spread import TokenSpread


@cases
def paged_attention_part(dtype: torch.dtype) -> Iterator[Case]:
    tolerance = 1e-5 if dtype is torch.float32 else 2**-7
    shapes = [(4, 1, 24, 40, None), (4, 2, 33, 33, 3.0), (7, 1, 45, 0, None)]
    for (heads, kv_heads, key_size, own, cap), (ranks, interleave) in product(
        shapes, ((2, 1), (3, 4))
    ):
        spread = TokenSpread(ranks, interleave)
        for rank in range(ranks):
            pool = AttentionPool(dtype, kv_heads, key_size, 2, num_blocks=40, value_size=own)
            table = (torch.randperm(39)[:35] + 1).to(torch.int32).view(5, 7)
            layout = make_layout([1, 3, 20, 1, 130], [0, 0, 37, 350, 50])
            for blocks, seq_len in zip(table, layout.seq_lens.tolist(), strict=True):
                place = torch.arange(spread.count(seq_len, rank))
                content = torch.randn(len(place), kv_heads, pool.content_size).to(dtype)
                in_block = place % 32
                pool.kv_cache[blocks[place // 32].long(), in_block // 16, in_block % 16] = content
            query = strided(torch.randn(155, heads, key_size).to(dtype), padding=8)
            offset, value_size = (key_size, own) if own else (0, 33)
            args = (query, pool.kv_cache, table, layout, key_size**-0.5, offset, cap)
            out = poisoned(155, heads, value_size + 2, dtype=torch.float32)
            yield Case((*args, ranks, rank, interleave, out), tolerance)
