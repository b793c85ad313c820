"""Kimi delta attention (Kimi Team 2025, arXiv 2510.26692): a delta rule with decays by channel."""

from __future__ import annotations

import torch

from vllm.ops.layout import SequenceLayout, StatePlan, requests_of
from vllm.ops.operation import Written, operation
from vllm.ops.plain_math import sigmoid
from vllm.ops.recurrent import unit


@operation
def channel_delta_rule(
    qkv: torch.Tensor,
    log_decays: torch.Tensor,
    b: torch.Tensor,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: Written,
    out: Written,
) -> None:
    """The delta rule whose state forgets each key channel at its own rate, token by token.

    qkv: [tokens, heads * (2 * dk + dv)] after the convolution, as q of all heads, k, v, strided;
    log_decays: float32 [tokens, heads * dk], dense; b: [tokens, heads], strided; state_cache:
    float32 view [blocks, heads, dk, dv], strided but in its last dimension; out: [tokens, heads,
    dv] in qkv's dtype, dense.
    q and k are L2-normalised per head (1e-6 added to the sum of squares), q scaled by dk^-0.5;
    beta = sigmoid(b). Per token: S = diag(exp(log_decays)) S; S += k (beta (v - S^T k))^T;
    o = S^T q. All of it is computed in float32 and rounded once.
    """
    _, heads, dk, dv = state_cache.shape
    sizes = [heads * dk, heads * dk, heads * dv]
    for request in requests_of(layout, states):
        (state,) = request.load(state_cache)
        for piece in request.pieces():
            parts = torch.split(qkv[piece].float(), sizes, dim=-1)
            q, k, v = (part.reshape(len(part), heads, -1) for part in parts)
            q, k = unit(q) * dk**-0.5, unit(k)
            decays = torch.exp(log_decays[piece]).view(-1, heads, dk, 1)
            betas = sigmoid(b[piece].float())
            for t in range(len(v)):
                state *= decays[t]
                recalled = (state * k[t, :, :, None]).sum(1)
                update = (v[t] - recalled) * betas[t, :, None]
                state += k[t, :, :, None] * update[:, None]
                out[piece.start + t] = (state * q[t, :, :, None]).sum(1)
                request.keep(piece.start + t, [state_cache], [state])


@channel_delta_rule.contract
def _(
    qkv: torch.Tensor,
    log_decays: torch.Tensor,
    b: torch.Tensor,
    state_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    tokens = qkv.shape[0]
    _, heads, dk, dv = state_cache.shape
    assert qkv.shape[1] == heads * (2 * dk + dv) and qkv.stride(1) == 1
    assert log_decays.shape == (tokens, heads * dk) and log_decays.is_contiguous()
    assert b.shape == (tokens, heads) and (heads == 1 or b.stride(1) == 1)
    assert out.shape == (tokens, heads, dv) and out.is_contiguous()
    assert qkv.dtype is b.dtype is out.dtype
    assert log_decays.dtype is state_cache.dtype is torch.float32
    assert dv == 1 or state_cache.stride(3) == 1
