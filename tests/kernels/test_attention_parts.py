"""Attention over the parts of several ranks, merged: that over all tokens, in any chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from kernel_calls import Kernels, plain_kernels
from kernel_pools import PAGE_TOKENS, AttentionPool, make_layout, poisoned
from kernel_steps import some_sinks

from tests.grids import at_night
from vllm.model_executor.layers.attention.spread_attention import merge_parts
from vllm.ops.attention import paged_attention, paged_attention_part
from vllm.utils.token_spread import WHOLE, TokenSpread

HEADS, SIZE, PAGES = 5, 24, 3


class Spread:
    """One request, whose keys and values lie on ranks."""

    def __init__(self, tokens: int, dtype: torch.dtype, spread: TokenSpread) -> None:
        self.query = torch.randn(tokens, HEADS, SIZE).to(dtype)
        content = torch.randn(tokens, 1, 2 * SIZE).to(dtype)
        self.spread = spread
        position = torch.arange(tokens)
        num_blocks = 2 + tokens // (PAGE_TOKENS * PAGES)
        self.table = (torch.randperm(num_blocks - 1) + 1).to(torch.int32)[None]
        self.caches = []
        for rank in range(spread.ranks):
            pool = AttentionPool(dtype, 1, SIZE, PAGES, num_blocks=num_blocks)
            own = position[spread.rank_of(position) == rank]
            place = spread.place_of(own)
            assert place.tolist() == list(range(spread.count(tokens, rank)))
            page = place // PAGE_TOKENS
            block = self.table[0, page // PAGES].long()
            pool.kv_cache[block, page % PAGES, place % PAGE_TOKENS] = content[own]
            self.caches.append(pool.kv_cache)

    def attend(
        self,
        kernels: Kernels,
        ends: Sequence[int],
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend in chunks with these ends: [tokens, heads, size]."""
        outputs = []
        for begin, end in itertools.pairwise((0, *ends)):
            query, layout = self.query[begin:end], make_layout([end - begin], [begin])
            args = (self.table, layout, 0.3, SIZE)
            if self.spread == WHOLE:
                out = torch.empty_like(query)
                attend = kernels.implementation(paged_attention)
                whole = (*args, None, None, cap, sinks, out)
                paged_attention.run(attend, query, self.caches[0], *whole)
                outputs.append(out)
                continue
            part = poisoned(self.spread.ranks, len(query), HEADS, SIZE + 2, dtype=torch.float32)
            for rank, cache in enumerate(self.caches):
                where = (self.spread.ranks, rank, self.spread.interleave)
                attend = kernels.implementation(paged_attention_part)
                paged_attention_part.run(attend, query, cache, *args, cap, *where, part[rank])
            outputs.append(merge_parts(part, sinks).to(query.dtype))
        return torch.cat(outputs)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), at_night(3, 4), (4, 16)])
@pytest.mark.parametrize("tokens", [150, at_night(2200)])
def test_merged_parts_are_the_whole(
    native: Kernels, dtype: torch.dtype, is_plain: bool, ranks: int, interleave: int, tokens: int
) -> None:
    """Also with chunks, and for the first tokens, of which some ranks have none."""
    kernels = plain_kernels() if is_plain else native
    scoring: list[tuple[float | None, torch.Tensor | None]]
    scoring = [(None, None), (3.0, some_sinks(HEADS))]
    for cap, sinks in scoring:
        torch.manual_seed(0)
        whole = Spread(tokens, dtype, WHOLE)
        torch.manual_seed(0)
        spread = Spread(tokens, dtype, TokenSpread(ranks, interleave))
        assert torch.equal(spread.query, whole.query)
        found = spread.attend(kernels, [tokens], cap, sinks)
        expected = whole.attend(kernels, [tokens], cap, sinks)
        tolerance = 2e-6 if dtype is torch.float32 else 2**-7 if dtype is torch.bfloat16 else 2e-3
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        for threads in (1, 2) if tokens > 1024 and not is_plain else (1,):
            torch.set_num_threads(threads)
            ends = [1, 2, 18, tokens - 25, tokens - 1, tokens]
            assert torch.equal(spread.attend(kernels, ends, cap, sinks), found)
