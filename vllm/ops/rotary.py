"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch

from vllm.ops.operation import Written, operation


@operation
def rotary_embedding(
    positions: torch.Tensor, query: Written, key: Written, cos_sin: torch.Tensor, interleaved: bool
) -> None:
    """Rotate the first ``rotary_dim`` elements of each head, in place.

    positions: int64 [tokens]; query, key: [tokens, heads, head_size], strided; cos_sin: float32
    [max_position, rotary_dim], cosines then sines. Half-split (NeoX) pairs
    (i, i + rotary_dim / 2), or interleaved pairs (2i, 2i + 1).
    """
    rotary_dim = cos_sin.shape[1]
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
    for heads in (query, key):
        if interleaved:
            first, second = heads[..., 0:rotary_dim:2], heads[..., 1:rotary_dim:2]
        else:
            first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
        x, y = first.float(), second.float()
        rotated = x * cos - y * sin
        second.copy_(y * cos + x * sin)
        first.copy_(rotated)


@rotary_embedding.contract
def _(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
) -> None:
    assert positions.dtype is torch.int64 and positions.is_contiguous()
    assert positions.shape[0] == query.shape[0] == key.shape[0]
    assert cos_sin.dtype is torch.float32 and cos_sin.stride(1) == 1
    assert query.dtype is key.dtype and query.stride(2) == key.stride(2) == 1
    assert cos_sin.shape[1] <= query.shape[2] == key.shape[2]
