"""Recurrent layers: causal convolution and the gated delta rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm.ops.layout import (
    PENDING_TOKENS,
    SequenceLayout,
    StatePlan,
    StateTensor,
    check_pending,
    requests_of,
)
from vllm.ops.operation import Written, operation, source_of
from vllm.ops.plain_math import sigmoid, silu, softplus

_CONV_PIECE_TOKENS = 512
"""Tokens for which float32 intermediates are held at once; no value depends on this number."""

_L2_EPS = 1e-6


@operation
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    applies_silu: bool,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: Written,
    out: Written,
) -> None:
    """Depthwise causal convolution over time, then SiLU if ``applies_silu``.

    x: [tokens, channels], strided; weight: [channels, width]; bias: [channels] or None;
    state_cache: strided view [blocks, width - 1, channels] in x's dtype (the last inputs, oldest
    first); out: [tokens, channels], strided.
    """
    past = weight.shape[1] - 1
    requests = list(requests_of(layout, states))
    if not requests:
        return
    runs: list[torch.Tensor] = []
    for request in requests:
        state = state_cache[request.block]
        runs.append(state if request.has_state else torch.zeros_like(state))
        runs.append(x[request.begin : request.end])
    inputs = torch.cat(runs)  # each request: its past inputs, then its tokens
    rows = _convolve(inputs, weight.float(), None if bias is None else bias.float(), applies_silu)
    start = 0
    for request in requests:
        num_tokens = request.end - request.begin
        out[request.begin : request.end] = rows[start : start + num_tokens]
        for tokens, block in (*request.snapshots, (num_tokens, request.block)):
            state_cache[block] = inputs[start + tokens : start + tokens + past]
        start += past + num_tokens


@causal_conv1d.contract
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    assert x.dtype is weight.dtype is state_cache.dtype is out.dtype and x.shape == out.shape
    assert x.stride(1) == state_cache.stride(2) == out.stride(1) == 1 and weight.is_contiguous()
    assert weight.shape[0] == x.shape[1] == state_cache.shape[2]
    assert weight.shape[1] == state_cache.shape[1] + 1
    assert bias is None or (bias.dtype is x.dtype and bias.is_contiguous())


def _convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, applies_silu: bool
) -> torch.Tensor:
    """Convolve: row t covers the inputs t .. t + width - 1. Result in the inputs' dtype."""
    width = weight.shape[1]
    taps = weight.t().contiguous()  # [width, channels]
    num_rows = inputs.shape[0] - width + 1
    out = inputs.new_empty(num_rows, inputs.shape[1])
    for start in range(0, num_rows, _CONV_PIECE_TOKENS):
        end = min(start + _CONV_PIECE_TOKENS, num_rows)
        piece = inputs[start : end + width - 1].float()
        acc = piece[: end - start] * taps[0]
        for tap in range(1, width):
            acc += piece[tap : tap + end - start] * taps[tap]
        if bias is not None:
            acc += bias
        out[start:end] = silu(acc) if applies_silu else acc
    return out


class _TokenInputs(NamedTuple):
    """Inputs of the delta rule for some tokens, float32."""

    pairs: torch.Tensor
    """[tokens, v_heads, 2, dk]: the normalised key, then the scaled normalised query."""
    products: torch.Tensor
    """[tokens, v_heads, 1]: their inner products."""
    values: torch.Tensor
    """[tokens, v_heads, dv]"""
    decays: torch.Tensor
    """[tokens, v_heads, 1]"""
    betas: torch.Tensor
    """[tokens, v_heads, 1]"""


class DeltaRuleShape(NamedTuple):
    """Numbers of heads and their sizes."""

    num_k_heads: int
    num_v_heads: int
    dk: int
    dv: int


def pending_tensors(
    device_type: str, dtype: torch.dtype, num_k_heads: int, num_v_heads: int, dk: int, dv: int
) -> tuple[StateTensor, ...]:
    """Tensors that :func:`gated_delta_rule` keeps of a request besides its state.

    Kernels that advance the state by whole chunks keep the tokens since the last chunk.
    """
    if dtype is torch.float32 or not source_of(device_type).keeps_pending:
        return ()
    return tokens_since_a_chunk(dtype, num_k_heads, num_v_heads, dk, dv)


def tokens_since_a_chunk(
    dtype: torch.dtype, num_k_heads: int, num_v_heads: int, dk: int, dv: int
) -> tuple[StateTensor, ...]:
    """Keys, updates and decays of the tokens that the state does not include yet."""
    return (
        StateTensor((num_k_heads, PENDING_TOKENS, dk), dtype),
        StateTensor((num_v_heads, PENDING_TOKENS, dv), torch.float32),
        StateTensor((num_v_heads, PENDING_TOKENS), torch.float32),
    )


@operation
def gated_delta_rule(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    num_k_heads: int,
    beta_scale: float,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: Written,
    pending: Sequence[Written],
    out: Written,
) -> None:
    """The gated delta rule (Yang et al. 2024).

    qkv: [tokens, 2 * num_k_heads * dk + num_v_heads * dv] after the convolution; a, b: [tokens,
    num_v_heads], strided; a_log, dt_bias: [num_v_heads]; state_cache: float32 strided view
    [blocks, num_v_heads, dk, dv]; pending: views [blocks, ...] of the tensors that
    :func:`pending_tensors` names, which complete a state in the pool (each kernel has its own
    layout of states there); out: [tokens, num_v_heads, dv] in qkv's dtype, dense.
    q and k are L2-normalised per head (1e-6 added to the sum of squares), q scaled by dk^-0.5;
    k-head h serves v-heads h*r .. h*r+r-1.
    decay = exp(-exp(a_log) * softplus(a + dt_bias)), beta = beta_scale sigmoid(b).
    Per token: S *= decay; S += k (beta (v - S^T k))^T; o = S^T q. 16-bit kernels may round the
    state to bfloat16 for its products.
    """
    assert not pending
    shape = DeltaRuleShape(num_k_heads, *state_cache.shape[1:])
    rate = -torch.exp(a_log.float())
    for request in requests_of(layout, states):
        (state,) = request.load(state_cache)
        for piece in request.pieces():
            tokens = _token_inputs(qkv[piece], a[piece], b[piece], rate, dt_bias, shape)
            tokens.betas.mul_(beta_scale)
            rows = torch.empty_like(tokens.values)
            for t in range(rows.shape[0]):
                _delta_step(state, tokens, t, rows)
                request.keep(piece.start + t, [state_cache], [state])
            out[piece] = rows


@gated_delta_rule.contract
def _(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    num_k_heads: int,
    state_cache: torch.Tensor,
    pending: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    blocks, num_v_heads, dk, dv = state_cache.shape
    tokens = qkv.shape[0]
    assert qkv.shape[1] == 2 * num_k_heads * dk + num_v_heads * dv and qkv.stride(1) == 1
    assert num_v_heads % num_k_heads == 0 and out.shape == (tokens, num_v_heads, dv)
    assert a.dtype is b.dtype is qkv.dtype is out.dtype and out.is_contiguous()
    assert a.shape == b.shape == (tokens, num_v_heads) and a.stride(1) == b.stride(1) == 1
    assert a_log.shape == dt_bias.shape == (num_v_heads,)
    assert a_log.is_contiguous() and dt_bias.is_contiguous()
    assert state_cache.dtype is torch.float32 and state_cache.stride(3) == 1
    sizes = (num_k_heads, num_v_heads, dk, dv)
    check_pending(pending, blocks, tokens_since_a_chunk(qkv.dtype, *sizes))


def _token_inputs(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rate: torch.Tensor,
    dt_bias: torch.Tensor,
    shape: DeltaRuleShape,
) -> _TokenInputs:
    key_width = shape.num_k_heads * shape.dk
    sizes = [key_width, key_width, shape.num_v_heads * shape.dv]
    q, k, v = torch.split(qkv.float(), sizes, dim=-1)
    q = unit(q.reshape(-1, shape.num_k_heads, shape.dk)) * shape.dk**-0.5
    k = unit(k.reshape(-1, shape.num_k_heads, shape.dk))
    group = shape.num_v_heads // shape.num_k_heads
    products = (q * k).sum(dim=-1, keepdim=True)
    decays = torch.exp(rate * softplus(a.float() + dt_bias.float()))
    return _TokenInputs(
        torch.stack((k, q), dim=2).repeat_interleave(group, dim=1),
        products.repeat_interleave(group, dim=1),
        v.reshape(-1, shape.num_v_heads, shape.dv),
        decays.unsqueeze(-1),
        sigmoid(b.float()).unsqueeze(-1),
    )


def unit(x: torch.Tensor) -> torch.Tensor:
    """Scale the rows of the last dimension to length one."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _L2_EPS)


def _delta_step(state: torch.Tensor, tokens: _TokenInputs, t: int, rows: torch.Tensor) -> None:
    """Advance ``state`` [v_heads, dk, dv] by token t in place; its output goes to ``rows[t]``.

    With r = decay * S^T k and p = decay * S^T q of the old state, the value to store is
    u = beta (v - r), and the new state S' = decay * S + k u^T gives
    S'^T q = p + (k . q) u. So one product reads the state for both.
    """
    pair = tokens.pairs[t].clone()  # a copy: the product always sees the same alignment
    decay = tokens.decays[t]
    read = torch.bmm(pair, state).mul_(decay.unsqueeze(-1))  # [v_heads, 2, dv]
    update = (tokens.values[t] - read[:, 0]).mul_(tokens.betas[t])
    state.mul_(decay.unsqueeze(-1))
    state.add_(pair[:, 0].unsqueeze(-1) * update.unsqueeze(1))
    torch.add(read[:, 1], tokens.products[t] * update, out=rows[t])
