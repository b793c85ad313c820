"""The mLSTM of xLSTM (Beck et al. 2024, arXiv 2405.04517): a recurrence with a matrix memory."""

from __future__ import annotations

import torch

from vllm.ops.layout import SequenceLayout, StatePlan, requests_of
from vllm.ops.operation import Written, operation
from vllm.ops.plain_math import softplus


@operation
def mlstm(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    gate_cap: float,
    epsilon: float,
    layout: SequenceLayout,
    states: StatePlan,
    memory_cache: Written,
    normaliser_cache: Written,
    stabiliser_cache: Written,
    out: Written,
) -> None:
    """The mLSTM with exponential input gates, token by token.

    qkv: [tokens, heads * (2 * dk + dv)], q of all heads, k, v, strided; gates: [tokens, 2 * heads],
    input gates, then forget gates, strided; caches: float32 views [blocks, heads, dk, dv],
    [blocks, heads, dk] and [blocks, heads], strided but in their last dimension; out: [tokens,
    heads, dv] in qkv's dtype, dense.
    Gates g become gate_cap tanh(g / gate_cap). Per token, with f = log(sigmoid(forget)) and
    m' = max(f + m, input): C = e^(f + m - m') C + e^(input - m') k v^T, n likewise with k, m = m';
    h = C^T q / (max(|n . q|, e^-m) + epsilon), q scaled by dk^-0.5. All states begin with zeros,
    m too. All of it is computed in float32 and rounded once.
    """
    _, heads, dk, dv = memory_cache.shape
    sizes = [heads * dk, heads * dk, heads * dv]
    caches = (memory_cache, normaliser_cache, stabiliser_cache)
    for request in requests_of(layout, states):
        memory, normaliser, stabiliser = request.load(*caches)
        for piece in request.pieces():
            parts = torch.split(qkv[piece].float(), sizes, dim=-1)
            q, k, v = (part.reshape(len(part), heads, -1) for part in parts)
            q = q * dk**-0.5
            capped = torch.tanh(gates[piece].float() / gate_cap) * gate_cap
            inputs, forgets = capped.chunk(2, dim=-1)
            log_forgets = -softplus(-forgets)
            for t in range(len(v)):
                faded = log_forgets[t] + stabiliser
                stabiliser = torch.maximum(faded, inputs[t])
                kept = torch.exp(faded - stabiliser)
                keys = k[t] * torch.exp(inputs[t] - stabiliser)[:, None]
                memory = kept[:, None, None] * memory + keys[:, :, None] * v[t, :, None]
                normaliser = kept[:, None] * normaliser + keys
                size = (normaliser * q[t]).sum(-1).abs()
                size = torch.maximum(size, torch.exp(-stabiliser)) + epsilon
                out[piece.start + t] = (memory * q[t, :, :, None]).sum(1) / size[:, None]
                request.keep(piece.start + t, caches, (memory, normaliser, stabiliser))


@mlstm.contract
def _(
    qkv: torch.Tensor,
    gates: torch.Tensor,
    gate_cap: float,
    memory_cache: torch.Tensor,
    normaliser_cache: torch.Tensor,
    stabiliser_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    tokens = qkv.shape[0]
    blocks, heads, dk, dv = memory_cache.shape
    assert qkv.shape[1] == heads * (2 * dk + dv) and qkv.stride(1) == 1
    assert gates.shape == (tokens, 2 * heads) and gates.stride(1) == 1 and gate_cap > 0.0
    assert normaliser_cache.shape == (blocks, heads, dk)
    assert stabiliser_cache.shape == (blocks, heads)
    assert out.shape == (tokens, heads, dv) and out.is_contiguous()
    assert qkv.dtype is gates.dtype is out.dtype
    for cache in (memory_cache, normaliser_cache, stabiliser_cache):
        assert cache.dtype is torch.float32
        assert cache.shape[-1] == 1 or cache.stride(-1) == 1
