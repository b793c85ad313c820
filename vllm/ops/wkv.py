"""The recurrence of RWKV-4 (Peng et al. 2023, arXiv 2305.13048): a weighted mean per channel."""

from __future__ import annotations

import torch

from vllm.ops.layout import SequenceLayout, StatePlan, requests_of
from vllm.ops.operation import Written, operation
from vllm.ops.plain_math import sigmoid

NO_TOKEN = -1e38
"""Stands for the greatest exponent before a request's first token: far below all, yet finite."""


@operation
def wkv(
    key: torch.Tensor,
    value: torch.Tensor,
    receptance: torch.Tensor,
    log_decay: torch.Tensor,
    bonus: torch.Tensor,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: Written,
    out: Written,
) -> None:
    """RWKV-4's weighted mean of values, token by token, and the gate after it.

    key, value, receptance (before its sigmoid): [tokens, channels], strided; log_decay (below 0),
    bonus: float32 [channels]; state_cache: float32 view [blocks, 3, channels], strided but in its
    last dimension: numerator and denominator over e^g, and g, the greatest exponent; out: [tokens,
    channels] in key's dtype, strided.
    Per token and channel: out = sigmoid(receptance) (N + e^(bonus + key) value) /
    (D + e^(bonus + key)); then N = e^log_decay N + e^key value, D = e^log_decay D + e^key.
    All of it is computed in float32 and rounded once.
    """
    caches = state_cache.unbind(1)
    for request in requests_of(layout, states):
        top, bottom, greatest = request.load(*caches)
        if not request.has_state:
            greatest.fill_(NO_TOKEN)
        for piece in request.pieces():
            keys, values = key[piece].float(), value[piece].float()
            rows = torch.empty_like(keys)
            for t in range(len(rows)):
                own = keys[t] + bonus
                limit = torch.maximum(greatest, own)
                kept, added = torch.exp(greatest - limit), torch.exp(own - limit)
                rows[t] = (kept * top + added * values[t]) / (kept * bottom + added)
                limit = torch.maximum(greatest + log_decay, keys[t])
                kept, added = torch.exp(greatest + log_decay - limit), torch.exp(keys[t] - limit)
                top = kept * top + added * values[t]
                bottom, greatest = kept * bottom + added, limit
                request.keep(piece.start + t, caches, (top, bottom, greatest))
            out[piece] = rows * sigmoid(receptance[piece].float())


@wkv.contract
def _(
    key: torch.Tensor,
    value: torch.Tensor,
    receptance: torch.Tensor,
    log_decay: torch.Tensor,
    bonus: torch.Tensor,
    state_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    channels = key.shape[1]
    for each in (key, value, receptance, out):
        assert each.shape == key.shape and each.dtype is key.dtype
        assert channels == 1 or each.stride(1) == 1
    for values in (log_decay, bonus):
        assert values.shape == (channels,) and values.is_contiguous()
        assert values.dtype is torch.float32
    assert state_cache.shape[1:] == (3, channels) and state_cache.dtype is torch.float32
    assert channels == 1 or state_cache.stride(2) == 1
