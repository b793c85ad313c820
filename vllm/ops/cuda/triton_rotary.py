"""Rotary embedding in Triton, alone and after the norms of heads.

Every head of a token has its own place in a program, so its bits do not depend on other heads.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.ops import rotary

_TILE, _TILE_WITH_NORM = 2048, 1024
"""Pairs of elements of a program."""


@rotary.rotary_embedding.override("cuda")
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    interleaved: bool,
) -> None:
    half = cos_sin.shape[1] // 2
    if query.shape[0] == 0:
        return
    most_heads = max(query.shape[1], key.shape[1])
    padded = triton.next_power_of_2(half)
    heads = _heads_at_once(_TILE, most_heads, padded)
    _rotary_kernel[(query.shape[0], triton.cdiv(most_heads, heads))](
        *(positions, query, key, cos_sin),
        *(*query.stride()[:2], *key.stride()[:2], cos_sin.stride(0)),
        num_query_heads=query.shape[1],
        num_key_heads=key.shape[1],
        half=half,
        padded=padded,
        tile_heads=heads,
        interleaved=interleaved,
        num_warps=4,
    )


def _heads_at_once(tile: int, most_heads: int, padded: int) -> int:
    return int(min(triton.next_power_of_2(most_heads), max(1, tile // padded)))


@triton.jit
def _angle(positions, cos_sin, stride, half: tl.constexpr, padded: tl.constexpr):
    """Cosines and sines of the program's token, [1, padded] each."""
    index = tl.arange(0, padded)
    angles = cos_sin + tl.load(positions + tl.program_id(0)) * stride + index
    cos = tl.load(angles, mask=index < half, other=0.0)[None, :]
    sin = tl.load(angles + half, mask=index < half, other=0.0)[None, :]
    return cos, sin


@triton.jit
def _load_pairs(
    starts, inside, half: tl.constexpr, padded: tl.constexpr, interleaved: tl.constexpr
):
    """First and second elements of the pairs of rows that begin at ``starts``, in float32.

    Pair p is the elements (p, p + half), or if interleaved (2 p, 2 p + 1).
    """
    if interleaved:
        index = tl.arange(0, 2 * padded)
        mask = inside[:, None] & (index < 2 * half)[None, :]
        both = tl.load(starts[:, None] + index[None, :], mask=mask, other=0.0)
        both = tl.reshape(both, (starts.shape[0], padded, 2)).to(tl.float32)
        first, second = tl.split(both)
    else:
        index = tl.arange(0, padded)
        mask = inside[:, None] & (index < half)[None, :]
        near = starts[:, None] + index[None, :]
        first = tl.load(near, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(near + half, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store_rotated(
    starts,
    inside,
    first,
    second,
    cos,
    sin,
    half: tl.constexpr,
    padded: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Rotate pairs, and store them where ``_load_pairs`` reads them."""
    element = starts.dtype.element_ty
    if interleaved:
        pairs = tl.join(first * cos - second * sin, second * cos + first * sin)
        pairs = tl.reshape(pairs.to(element), (starts.shape[0], 2 * padded))
        index = tl.arange(0, 2 * padded)
        mask = inside[:, None] & (index < 2 * half)[None, :]
        tl.store(starts[:, None] + index[None, :], pairs, mask=mask)
    else:
        index = tl.arange(0, padded)
        mask = inside[:, None] & (index < half)[None, :]
        near = starts[:, None] + index[None, :]
        tl.store(near, (first * cos - second * sin).to(element), mask=mask)
        tl.store(near + half, (second * cos + first * sin).to(element), mask=mask)


@triton.jit
def _rotary_kernel(
    positions,
    query,
    key,
    cos_sin,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    cos_sin_stride,
    num_query_heads: tl.constexpr,
    num_key_heads: tl.constexpr,
    half: tl.constexpr,
    padded: tl.constexpr,
    tile_heads: tl.constexpr,
    interleaved: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    cos, sin = _angle(positions, cos_sin, cos_sin_stride, half, padded)
    starts = query + token * query_token_stride + head * query_head_stride
    inside = head < num_query_heads
    first, second = _load_pairs(starts, inside, half, padded, interleaved)
    _store_rotated(starts, inside, first, second, cos, sin, half, padded, interleaved)
    if tl.program_id(1) * tile_heads < num_key_heads:
        starts = key + token * key_token_stride + head * key_head_stride
        inside = head < num_key_heads
        first, second = _load_pairs(starts, inside, half, padded, interleaved)
        _store_rotated(starts, inside, first, second, cos, sin, half, padded, interleaved)


@rotary.norm_and_rotate.override("cuda")
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
    query_out: torch.Tensor,
    key_out: torch.Tensor,
) -> None:
    tokens, num_heads, size = query.shape
    if tokens == 0:
        return
    half = cos_sin.shape[1] // 2
    padded, rest = triton.next_power_of_2(half), size - 2 * half
    padded_rest = triton.next_power_of_2(rest) if rest else 0
    most_heads = max(num_heads, key.shape[1])
    heads = _heads_at_once(_TILE_WITH_NORM, most_heads, max(padded, padded_rest))
    tiles = triton.cdiv(num_heads, heads) + triton.cdiv(key.shape[1], heads)
    _norm_rotary_kernel[(tokens, tiles)](
        *(positions, query, key, query_weight, key_weight, cos_sin, query_out, key_out),
        *(*query.stride()[:2], *key.stride()[:2], cos_sin.stride(0), epsilon, offset),
        num_query_heads=num_heads,
        num_key_heads=key.shape[1],
        size=size,
        half=half,
        padded=padded,
        padded_rest=padded_rest,
        tile_heads=heads,
        interleaved=interleaved,
        round_first=offset == 0.0,
        num_warps=4,
    )


@triton.jit
def _scaled(values, factor, weights, offset, element: tl.constexpr, round_first: tl.constexpr):
    """A normalised part of rows times its weights, rounded as by a norm alone."""
    values = values * factor[:, None]
    if round_first:
        values = values.to(element).to(tl.float32) * weights
    else:
        values = values * (weights + offset)
    return values.to(element).to(tl.float32)


@triton.jit
def _norm_and_rotate(
    x,
    head_stride,
    weight,
    out,
    tile,
    cos,
    sin,
    eps,
    offset,
    num_heads: tl.constexpr,
    size: tl.constexpr,
    half: tl.constexpr,
    padded: tl.constexpr,
    padded_rest: tl.constexpr,
    tile_heads: tl.constexpr,
    interleaved: tl.constexpr,
    round_first: tl.constexpr,
):
    head = tile * tile_heads + tl.arange(0, tile_heads)
    inside = head < num_heads
    starts, targets = x + head * head_stride, out + head * size
    element: tl.constexpr = out.dtype.element_ty
    first, second = _load_pairs(starts, inside, half, padded, interleaved)
    square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if padded_rest:
        index = tl.arange(0, padded_rest)
        mask = inside[:, None] & (index < size - 2 * half)[None, :]
        rest = tl.load(starts[:, None] + 2 * half + index[None, :], mask=mask, other=0.0)
        rest = rest.to(tl.float32)
        square += tl.sum(rest * rest, 1)
    factor = tl.rsqrt(square / size + eps)
    everywhere = tl.arange(0, 1) == 0
    to_first, to_second = _load_pairs(
        weight + tl.arange(0, 1), everywhere, half, padded, interleaved
    )
    first = _scaled(first, factor, to_first, offset, element, round_first)
    second = _scaled(second, factor, to_second, offset, element, round_first)
    _store_rotated(targets, inside, first, second, cos, sin, half, padded, interleaved)
    if padded_rest:
        to_rest = tl.load(weight + 2 * half + index, mask=index < size - 2 * half, other=0.0)
        to_rest = to_rest.to(tl.float32)[None, :]
        rest = _scaled(rest, factor, to_rest, offset, element, round_first)
        tl.store(targets[:, None] + 2 * half + index[None, :], rest.to(element), mask=mask)


@triton.jit
def _norm_rotary_kernel(
    positions,
    query,
    key,
    query_weight,
    key_weight,
    cos_sin,
    query_out,
    key_out,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    cos_sin_stride,
    eps,
    offset,
    num_query_heads: tl.constexpr,
    num_key_heads: tl.constexpr,
    size: tl.constexpr,
    half: tl.constexpr,
    padded: tl.constexpr,
    padded_rest: tl.constexpr,
    tile_heads: tl.constexpr,
    interleaved: tl.constexpr,
    round_first: tl.constexpr,
):
    """Some heads of one token; heads of the query come first."""
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_tiles: tl.constexpr = (num_query_heads + tile_heads - 1) // tile_heads
    cos, sin = _angle(positions, cos_sin, cos_sin_stride, half, padded)
    if tile < query_tiles:
        out = query_out + token * (num_query_heads * size)
        _norm_and_rotate(
            *(query + token * query_token_stride, query_head_stride, query_weight, out, tile),
            *(cos, sin, eps, offset, num_query_heads, size, half, padded, padded_rest),
            *(tile_heads, interleaved, round_first),
        )
    else:
        out = key_out + token * (num_key_heads * size)
        _norm_and_rotate(
            *(key + token * key_token_stride, key_head_stride, key_weight, out),
            *(tile - query_tiles, cos, sin, eps, offset, num_key_heads, size, half, padded),
            *(padded_rest, tile_heads, interleaved, round_first),
        )
