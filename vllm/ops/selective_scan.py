"""The recurrence of Mamba (Gu and Dao 2023): a diagonal state for every channel."""

from __future__ import annotations

import torch

from vllm.ops.layout import SequenceLayout, StatePlan, requests_of
from vllm.ops.operation import Written, operation
from vllm.ops.plain_math import silu, softplus


@operation
def selective_scan(
    x: torch.Tensor,
    step: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    rates: torch.Tensor,
    step_bias: torch.Tensor,
    skip: torch.Tensor,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: Written,
    out: Written,
) -> None:
    """Mamba's selective scan, token by token, and the gate after it.

    x (after the convolution), step, gate: [tokens, channels], strided; b, c: [tokens, groups,
    state_size], strided; a group serves channels / groups neighbouring channels; rates: float32
    [state_size, channels], all below 0 (``-exp(A_log)``, transposed); step_bias, skip: float32
    [channels]; state_cache: float32 strided view [blocks, state_size, channels]; out: [tokens,
    channels] in x's dtype, strided.
    Per token and channel, with d = softplus(step + step_bias): S = exp(d rates) S + d x b;
    out = (c . S + skip x) silu(gate). All of it is computed in float32 and rounded once.
    """
    channels = x.shape[1]
    for request in requests_of(layout, states):
        (state,) = request.load(state_cache)
        for piece in request.pieces():
            inputs = x[piece].float()
            steps = softplus(step[piece].float() + step_bias)
            # [tokens, state_size, channels]
            keys, queries = (
                part[piece].float().transpose(1, 2).repeat_interleave(channels // b.shape[1], 2)
                for part in (b, c)
            )
            rows = inputs * skip
            for t in range(len(rows)):
                state *= torch.exp(rates * steps[t])
                state += keys[t] * (steps[t] * inputs[t])
                rows[t] += (queries[t] * state).sum(dim=0)
                request.keep(piece.start + t, [state_cache], [state])
            out[piece] = rows * silu(gate[piece].float())


@selective_scan.contract
def _(
    x: torch.Tensor,
    step: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor,
    rates: torch.Tensor,
    step_bias: torch.Tensor,
    skip: torch.Tensor,
    state_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    tokens, channels = x.shape
    assert step.shape == gate.shape == out.shape == x.shape
    assert x.dtype is step.dtype is b.dtype is c.dtype is gate.dtype is out.dtype
    assert x.stride(1) == step.stride(1) == gate.stride(1) == out.stride(1) == 1
    state_size = rates.shape[0]
    assert b.shape == c.shape == (tokens, b.shape[1], state_size) and channels % b.shape[1] == 0
    assert state_size == 1 or b.stride(2) == c.stride(2) == 1
    assert rates.shape == state_cache.shape[1:] == (state_size, channels)
    assert step_bias.shape == skip.shape == (channels,) and state_cache.stride(2) == 1
    for values in (rates, step_bias, skip):
        assert values.dtype is torch.float32 and values.is_contiguous()
    assert state_cache.dtype is torch.float32
