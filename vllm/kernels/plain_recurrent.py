"""Recurrent layers in plain torch: causal convolution and the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from vllm.kernels.base import SequenceLayout, StatePlan
from vllm.kernels.plain_math import sigmoid, silu, softplus

_CONV_PIECE_TOKENS = 512
_DELTA_PIECE_TOKENS = 128
"""Tokens for which float32 intermediates are held at once; no value depends on them."""

_L2_EPS = 1e-6


class _RequestState(NamedTuple):
    """One request of the step: its tokens in the flat batch, and where its state goes."""

    begin: int
    end: int
    block: int
    has_state: bool
    snapshots: list[tuple[int, int]]
    """(tokens of this chunk, block), in order of tokens."""


def _requests(layout: SequenceLayout, states: StatePlan) -> Iterator[_RequestState]:
    """The requests that have tokens in this step."""
    starts = layout.query_start.tolist()
    blocks = states.block_ids.tolist()
    has_state = states.has_state.tolist()
    bounds = states.snapshot_start.tolist()
    snapshots = list(
        zip(states.snapshot_tokens.tolist(), states.snapshot_blocks.tolist(), strict=True)
    )
    for r, block in enumerate(blocks):
        if starts[r] < starts[r + 1]:
            own = snapshots[bounds[r] : bounds[r + 1]]
            yield _RequestState(starts[r], starts[r + 1], block, has_state[r], own)


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state_cache: torch.Tensor,
    layout: SequenceLayout,
    states: StatePlan,
) -> torch.Tensor:
    """See :meth:`vllm.kernels.base.Kernels.causal_conv1d`."""
    past = weight.shape[1] - 1
    requests = list(_requests(layout, states))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not requests:
        return out
    runs: list[torch.Tensor] = []
    for request in requests:
        state = state_cache[request.block]
        runs.append(state if request.has_state else torch.zeros_like(state))
        runs.append(x[request.begin : request.end])
    inputs = torch.cat(runs)  # each request: its past inputs, then its tokens
    rows = _convolve(inputs, weight.float(), None if bias is None else bias.float())
    start = 0
    for request in requests:
        num_tokens = request.end - request.begin
        out[request.begin : request.end] = rows[start : start + num_tokens]
        for tokens, block in (*request.snapshots, (num_tokens, request.block)):
            state_cache[block] = inputs[start + tokens : start + tokens + past]
        start += past + num_tokens
    return out


def _convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Row t: SiLU of the convolution over inputs t .. t + width - 1, in inputs' dtype."""
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
        out[start:end] = silu(acc)
    return out


class _TokenInputs(NamedTuple):
    """What the delta rule reads of some tokens, float32."""

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
    """Heads and their sizes."""

    num_k_heads: int
    num_v_heads: int
    dk: int
    dv: int


def gated_delta_rule(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_cache: torch.Tensor,
    num_k_heads: int,
    layout: SequenceLayout,
    states: StatePlan,
) -> torch.Tensor:
    """See :meth:`vllm.kernels.base.Kernels.gated_delta_rule`."""
    shape = DeltaRuleShape(num_k_heads, *state_cache.shape[1:])
    rate = -torch.exp(a_log.float())
    out = qkv.new_empty(qkv.shape[0], shape.num_v_heads, shape.dv)
    for request in _requests(layout, states):
        state = state_cache[request.block].contiguous().clone()
        if not request.has_state:
            state.zero_()
        for start in range(request.begin, request.end, _DELTA_PIECE_TOKENS):
            piece = slice(start, min(start + _DELTA_PIECE_TOKENS, request.end))
            tokens = _token_inputs(qkv[piece], a[piece], b[piece], rate, dt_bias, shape)
            rows = torch.empty_like(tokens.values)
            offset = start - request.begin
            for t in range(rows.shape[0]):
                _delta_step(state, tokens, t, rows)
                for kept_tokens, block in request.snapshots:
                    if kept_tokens == offset + t + 1:
                        state_cache[block] = state
            out[piece] = rows
        state_cache[request.block] = state
    return out


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
    q = _unit(q.reshape(-1, shape.num_k_heads, shape.dk)) * shape.dk**-0.5
    k = _unit(k.reshape(-1, shape.num_k_heads, shape.dk))
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


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of the last dimension at length one."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _L2_EPS)


def _delta_step(state: torch.Tensor, tokens: _TokenInputs, t: int, rows: torch.Tensor) -> None:
    """Advance ``state`` [v_heads, dk, dv] by token t in place; its output goes to ``rows[t]``.

    With r = decay * S^T k and p = decay * S^T q of the old state, the value to store is
    u = beta (v - r), and the new state S' = decay * S + k u^T gives
    S'^T q = p + (k . q) u: one product reads the state for both.
    """
    pair = tokens.pairs[t].clone()  # a copy: the product always sees the same alignment
    decay = tokens.decays[t]
    read = torch.bmm(pair, state).mul_(decay.unsqueeze(-1))  # [v_heads, 2, dv]
    update = (tokens.values[t] - read[:, 0]).mul_(tokens.betas[t])
    state.mul_(decay.unsqueeze(-1))
    state.add_(pair[:, 0].unsqueeze(-1) * update.unsqueeze(1))
    torch.add(read[:, 1], tokens.products[t] * update, out=rows[t])
