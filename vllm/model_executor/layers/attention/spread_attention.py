"""Attention over tokens that are spread over ranks (decode_context_parallel_size,
prefill_context_parallel_size)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_context_group, get_dcp_group, get_pcp_group
from vllm.forward_context import current_shared_tokens
from vllm.ops.attention import paged_attention_part
from vllm.utils.math_utils import divisors
from vllm.utils.text import one_of
from vllm.utils.token_spread import TokenSpread

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadata

MOST_PART_BYTES = 64 * 2**20
"""Size of the parts of some heads that a rank computes at a time."""
_LN_2 = math.log(2)


def check_spread(vllm_config: VllmConfig, copies: int, prefix: str) -> None:
    """Raise ValueError if a layer's tokens cannot be spread; copies: ranks with the same heads."""
    size = vllm_config.parallel_config.decode_context_parallel_size
    if copies % size:
        ranks = vllm_config.parallel_config.tensor_parallel_size
        raise ValueError(
            f"decode_context_parallel_size={size}: of tensor_parallel_size={ranks} ranks {copies} "
            f"have the same key/value heads of {prefix!r}, and only these can spread its tokens; "
            f"use {one_of(divisors(copies))}, or more ranks"
        )


def attend_spread(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    spread: TokenSpread,
    scale: float,
    value_offset: int,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """:func:`vllm.ops.attention.paged_attention` for this rank's heads, over all ranks' tokens.

    query, out: of this rank's tokens if ranks share those of the step (get_pcp_group); or of all
    tokens, where each of these ranks has them. Each rank attends with the queries of all ranks of
    the group over its own cached tokens. Then it merges what all of them found for its heads and
    its queries.
    """
    prefill, decode, group = get_pcp_group(), get_dcp_group(), get_context_group()
    num_tokens = len(query)
    whole: torch.Tensor | None = None
    if prefill.world_size > 1 and not current_shared_tokens():
        whole, query = out, prefill.own_rows(query)
        out = whole.new_empty((len(query), *whole.shape[1:]))
    elif prefill.world_size > 1:
        num_tokens = current_shared_tokens()
    tokens, heads, value_size = out.shape
    head_bytes = tokens * group.world_size * (value_size + 2) * 4
    heads_at_once = max(1, MOST_PART_BYTES // max(1, head_bytes))
    for first in range(0, heads, heads_at_once):
        own = slice(first, first + heads_at_once)
        queries = decode.all_gather(prefill.all_gather(query[:, own], 0)[:num_tokens], 1)
        # Rows behind the last token stay undefined: they are results for such rows.
        shape = (prefill.world_size * tokens, queries.shape[1], value_size + 2)
        part = query.new_empty(shape, dtype=torch.float32)
        paged_attention_part(
            queries,
            kv_cache,
            metadata.block_table,
            metadata.layout,
            scale,
            value_offset,
            soft_cap,
            spread.ranks,
            group.rank_in_group,
            spread.interleave,
            part[:num_tokens],
        )
        by_rank = part.view(prefill.world_size, tokens, decode.world_size, -1, value_size + 2)
        parts = group.all_to_all(by_rank.transpose(1, 2).flatten(0, 1))
        out[:, own] = merge_parts(parts, None if sinks is None else sinks[own])
    if whole is not None:
        whole.copy_(prefill.all_gather(out, 0)[:num_tokens])


def merge_parts(parts: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Merge results of ``paged_attention_part``, in their order, in float32.

    parts: [ranks, tokens, heads, value_size + 2]; sinks: as for ``paged_attention``. Returns
    [tokens, heads, value_size].
    """
    values, tops, totals = parts[..., :-2], parts[..., -2:-1], parts[..., -1:]
    top = tops.amax(0)
    if sinks is not None:
        of_sinks = sinks.float()[:, None] / _LN_2
        top = torch.maximum(top, of_sinks)
    # A zero first, so that the sign of other zeros is lost.
    mixed, total = torch.zeros_like(values[0]), torch.zeros_like(top)
    for rank in range(len(parts)):
        weight = _power_of_2(tops[rank] - top)
        mixed += weight * values[rank]
        total += weight * totals[rank]
    if sinks is not None:
        total += _power_of_2(of_sinks - top)
    return mixed / total


def _power_of_2(x: torch.Tensor) -> torch.Tensor:
    # Unlike torch.exp2, torch.exp has the same bits for the elements at the end of a tensor.
    return torch.exp(x * _LN_2)
