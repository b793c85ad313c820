"""Naive float64 forms of the kernels, written from the formulas, and how near is near.

Every function takes float64 tensors of one request and loops where that is clearest.
"""

from __future__ import annotations

import math

import torch

HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-24}


def assert_near(
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    roundings: int = 1,
    allowance: torch.Tensor | None = None,
) -> None:
    """Within float32 arithmetic (2e-5 of the RMS) and ``roundings`` to dtype.

    That holds for every element (``allowance``: what an element may be off in addition),
    and all together are at most 1.25 times as far off as one rounding to dtype, for each
    rounding.
    """
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    if not expected.numel():
        return
    rms = _rms(expected)
    rounding = 1.02 * roundings * HALF_ULP[dtype] * expected.abs()
    bound = rounding + 2e-5 * rms + roundings * SMALLEST[dtype]
    if allowance is not None:
        bound += allowance
    error = (actual.double() - expected).abs()
    worst = float((error - bound).max())
    assert worst <= 0.0, f"error exceeds its bound by {worst:.3e} (RMS {rms:.3e})"
    rounding_rms = _rms(expected.to(dtype).double() - expected)
    assert _rms(error) <= 1.25 * roundings * rounding_rms + 2e-5 * rms


def _rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """x: [tokens, heads, head_size]; pairs are complex numbers times cos + i sin."""
    out = x.clone()
    half = cos_sin.shape[1] // 2
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            cos, sin = cos_sin[position, i], cos_sin[position, half + i]
            out[t, :, first] = x[t, :, first] * cos - x[t, :, second] * sin
            out[t, :, second] = x[t, :, first] * sin + x[t, :, second] * cos
    return out


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """query: the last tokens, [tokens, heads, n]; key, value: all, [seq_len, kv_heads, n].

    sinks: [heads], scores of keys that have no value.
    """
    out = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    context = key.shape[0] - query.shape[0]
    for t in range(query.shape[0]):
        position = context + t
        low = 0 if window is None else max(0, position - window + 1)
        low = low if chunk is None else position // chunk * chunk
        for head in range(query.shape[1]):
            keys = key[low : position + 1, head // group]
            scores = keys @ query[t, head] * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1]))
            weights = torch.softmax(scores, dim=0)[: len(keys)]
            out[t, head] = weights @ value[low : position + 1, head // group]
    return out


def convolve(
    x: torch.Tensor, past: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x: [tokens, channels] after ``past`` [width - 1, channels]. Returns [tokens, channels]."""
    inputs = torch.cat((past, x))
    width = weight.shape[1]
    rows = [(inputs[t : t + width] * weight.t()).sum(0) for t in range(x.shape[0])]
    out = torch.stack(rows)
    return silu(out if bias is None else out + bias)


def state_space(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    num_groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request from ``state`` [heads, state_size, head_dim].

    Returns outputs [tokens, heads, head_dim] and the state after each token
    [tokens, heads, state_size, head_dim].
    """
    heads, state_size, head_dim = state.shape
    group = heads // num_groups
    outputs, states = [], []
    for t in range(len(xbc)):
        widths = [heads * head_dim, num_groups * state_size, num_groups * state_size]
        x, b, c = (part.view(-1, n) for part, n in zip(
            torch.split(xbc[t], widths), (head_dim, state_size, state_size), strict=True
        ))  # fmt: skip
        step = torch.log1p(torch.exp(dt[t] + dt_bias))
        decay = torch.exp(-torch.exp(a_log) * step)
        added = [torch.outer(b[h // group], step[h] * x[h]) for h in range(heads)]
        state = state * decay[:, None, None] + torch.stack(added)
        rows = [c[h // group] @ state[h] + d[h] * x[h] for h in range(heads)]
        outputs.append(torch.stack(rows))
        states.append(state)
    if not outputs:
        return state.new_empty(0, heads, head_dim), state.new_empty(0, *state.shape)
    return torch.stack(outputs), torch.stack(states)


def delta_rule(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    num_k_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request from ``state`` [v_heads, dk, dv].

    Returns outputs [tokens, v_heads, dv] and the state after each token
    [tokens, v_heads, dk, dv].
    """
    num_v_heads, dk, dv = state.shape
    outputs = torch.empty(qkv.shape[0], num_v_heads, dv, dtype=torch.float64)
    states = torch.empty(qkv.shape[0], *state.shape, dtype=torch.float64)
    state = state.clone()
    for t in range(qkv.shape[0]):
        q, k, v = torch.split(qkv[t], [num_k_heads * dk, num_k_heads * dk, num_v_heads * dv])
        for head in range(num_v_heads):
            k_head = head // (num_v_heads // num_k_heads)
            q_h, k_h = q.view(-1, dk)[k_head], k.view(-1, dk)[k_head]
            q_h = q_h / (q_h.square().sum() + 1e-6).sqrt() / math.sqrt(dk)
            k_h = k_h / (k_h.square().sum() + 1e-6).sqrt()
            step = torch.log1p(torch.exp(a[t, head] + dt_bias[head]))
            decayed = state[head] * torch.exp(-torch.exp(a_log[head]) * step)
            update = torch.sigmoid(b[t, head]) * (v.view(-1, dv)[head] - k_h @ decayed)
            state[head] = decayed + torch.outer(k_h, update)
            outputs[t, head] = q_h @ state[head]
        states[t] = state
    return outputs, states
