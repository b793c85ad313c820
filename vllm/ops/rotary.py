"""Rotary position embedding (Su et al. 2021)."""

from __future__ import annotations

import torch

from vllm.ops.norms import rms_norm
from vllm.ops.operation import Written, operation


@operation
def rotary_embedding(
    positions: torch.Tensor, query: Written, key: Written, cos_sin: torch.Tensor, interleaved: bool
) -> None:
    """Rotate the first ``rotary_dim`` elements of each head, in place.

    positions: int64 [tokens]; query, key: [tokens, heads, head_size], strided; cos_sin: float32
    [max_position, rotary_dim], cosines then sines. Pairs are half-split as in NeoX
    (i, i + rotary_dim / 2), or interleaved (2i, 2i + 1).
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
) -> None:
    assert positions.dtype is torch.int64 and positions.is_contiguous()
    assert positions.shape[0] == query.shape[0] == key.shape[0]
    assert cos_sin.dtype is torch.float32 and cos_sin.stride(1) == 1
    assert query.dtype is key.dtype and query.stride(2) == key.stride(2) == 1
    assert cos_sin.shape[1] <= query.shape[2] == key.shape[2]


@operation
def norm_and_rotate(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    epsilon: float,
    offset: float,
    cos_sin: torch.Tensor,
    interleaved: bool,
    query_out: Written,
    key_out: Written,
) -> None:
    """:func:`vllm.ops.norms.rms_norm` of each head, then :func:`rotary_embedding`.

    query, key: [tokens, heads, head_size], strided; weights: [head_size]; outs: like those, dense.
    """
    rms_norm(query, query_weight, epsilon, offset, query_out)
    rms_norm(key, key_weight, epsilon, offset, key_out)
    rotary_embedding(positions, query_out, key_out, cos_sin, interleaved)


@norm_and_rotate.contract
def _(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    query_out: torch.Tensor,
    key_out: torch.Tensor,
) -> None:
    assert positions.dtype is torch.int64 and positions.is_contiguous()
    assert cos_sin.dtype is torch.float32 and cos_sin.stride(1) == 1
    assert cos_sin.shape[1] <= query.shape[2] == key.shape[2]
    for x, weight, out in ((query, query_weight, query_out), (key, key_weight, key_out)):
        assert x.dim() == 3 and len(positions) == len(x) and x.shape == out.shape
        assert x.dtype is weight.dtype is out.dtype and x.stride(2) == 1
        assert weight.shape == x.shape[2:] and weight.is_contiguous() and out.is_contiguous()
