"""The recurrence of Griffin (De et al. 2024, arXiv 2402.19427): one number per channel."""

from __future__ import annotations

import torch

from vllm.ops.layout import SequenceLayout, StatePlan, requests_of
from vllm.ops.operation import Written, operation
from vllm.ops.plain_math import sigmoid


@operation
def gated_linear_recurrence(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    decay_gate: torch.Tensor,
    rates: torch.Tensor,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: Written,
    out: Written,
) -> None:
    """The real-gated linear recurrent unit (RG-LRU), token by token.

    x, input_gate, decay_gate (both before their sigmoid): [tokens, channels], strided; rates:
    float32 [channels], all below 0; state_cache: float32 view [blocks, channels]; out: [tokens,
    channels] in x's dtype, strided.
    Per token and channel: a = exp(rates sigmoid(decay_gate)),
    S = a S + sqrt(1 - a^2) sigmoid(input_gate) x, with 1 instead of the root for a request's first
    token; out = S. All of it is computed in float32 and rounded once.
    """
    for request in requests_of(layout, states):
        (state,) = request.load(state_cache)
        for piece in request.pieces():
            decays = torch.exp(rates * sigmoid(decay_gate[piece].float()))
            roots = torch.sqrt(1.0 - decays * decays)
            if piece.start == request.begin and not request.has_state:
                roots[0] = 1.0
            rows = roots * sigmoid(input_gate[piece].float()) * x[piece].float()
            for t in range(len(rows)):
                state = rows[t].add_(decays[t] * state)
                request.keep(piece.start + t, [state_cache], [state])
            out[piece] = rows


@gated_linear_recurrence.contract
def _(
    x: torch.Tensor,
    input_gate: torch.Tensor,
    decay_gate: torch.Tensor,
    rates: torch.Tensor,
    state_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    for each in (x, input_gate, decay_gate, out):
        assert each.shape == x.shape and each.dtype is x.dtype and each.stride(1) == 1
    assert rates.shape == state_cache.shape[1:] == x.shape[1:] and rates.is_contiguous()
    assert rates.dtype is state_cache.dtype is torch.float32 and state_cache.stride(1) == 1
