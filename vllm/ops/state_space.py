"""State-space layers: the recurrence of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060)."""

from __future__ import annotations

from collections.abc import Sequence

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
from vllm.ops.plain_math import softplus


def pending_tensors(
    device_type: str,
    dtype: torch.dtype,
    heads: int,
    head_dim: int,
    num_groups: int,
    state_size: int,
) -> tuple[StateTensor, ...]:
    """Tensors that :func:`state_space_scan` keeps of a request besides its state.

    If products of pairs make it worthwhile, the state advances by whole chunks; then these are the
    tokens since the last chunk.
    """
    if dtype is not torch.bfloat16 or not source_of(device_type).multiplies_pairs:
        return ()
    return tokens_since_a_chunk(dtype, heads, head_dim, num_groups, state_size)


def tokens_since_a_chunk(
    dtype: torch.dtype, heads: int, head_dim: int, num_groups: int, state_size: int
) -> tuple[StateTensor, ...]:
    """x and B, and dt, of the tokens that the state does not include yet."""
    columns = heads * head_dim + num_groups * state_size
    return (
        StateTensor((PENDING_TOKENS, columns), dtype),
        StateTensor((PENDING_TOKENS, heads), dtype),
    )


@operation
def state_space_scan(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    num_groups: int,
    dt_min: float,
    dt_max: float,
    layout: SequenceLayout,
    states: StatePlan,
    state_cache: Written,
    pending: Sequence[Written],
    out: Written,
) -> None:
    """The selective state-space recurrence with one decay per head (Mamba-2).

    xbc: [tokens, heads * head_dim + 2 * num_groups * state_size] after the convolution, as x of
    all heads, B of all groups, C of all groups, strided; dt: [tokens, heads], strided; a_log,
    dt_bias, d: float32 [heads]; state_cache: float32 view [blocks, heads, state_size, head_dim],
    dense inside a block; pending: views [blocks, ...] of the tensors that :func:`pending_tensors`
    names, which complete a state in the pool (each kernel has its own layout of states there); out:
    [tokens, heads, head_dim] in xbc's dtype, dense.
    Group g serves heads g*r .. g*r+r-1, r = heads / num_groups.
    step = clamp(softplus(dt + dt_bias), dt_min, dt_max), decay = exp(-exp(a_log) * step).
    Per token: S = decay S + B (step x)^T; y = S^T C + d x. 16-bit kernels may round the state, and
    what a token adds to it, to bfloat16 for their products.
    """
    assert not pending
    _, heads, state_size, head_dim = state_cache.shape
    rate = -torch.exp(a_log)
    sizes = [heads * head_dim, num_groups * state_size, num_groups * state_size]
    for request in requests_of(layout, states):
        (state,) = request.load(state_cache)
        for piece in request.pieces():
            x, b, c = torch.split(xbc[piece].float(), sizes, dim=-1)
            x = x.reshape(-1, heads, head_dim)
            b, c = (each.reshape(-1, num_groups, state_size) for each in (b, c))
            b, c = (each.repeat_interleave(heads // num_groups, dim=1) for each in (b, c))
            step = softplus(dt[piece].float() + dt_bias).clamp(dt_min, dt_max)
            decay, update = torch.exp(step * rate), x * step[..., None]
            for t in range(len(x)):
                state.mul_(decay[t, :, None, None]).add_(b[t, :, :, None] * update[t, :, None])
                out[piece.start + t] = (state * c[t, :, :, None]).sum(1) + x[t] * d[:, None]
                request.keep(piece.start + t, [state_cache], [state])


@state_space_scan.contract
def _(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    num_groups: int,
    dt_min: float,
    dt_max: float,
    state_cache: torch.Tensor,
    pending: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    tokens = xbc.shape[0]
    heads, state_size, head_dim = state_cache.shape[1:]
    assert xbc.shape[1] == heads * head_dim + 2 * num_groups * state_size and xbc.stride(1) == 1
    assert heads % num_groups == 0 and 0.0 <= dt_min <= dt_max
    assert dt.shape == (tokens, heads) and (heads <= 1 or dt.stride(1) == 1)
    assert out.shape == (tokens, heads, head_dim) and out.is_contiguous()
    assert xbc.dtype is dt.dtype is out.dtype
    for values in (a_log, dt_bias, d):
        assert values.shape == (heads,) and values.is_contiguous()
        assert values.dtype is torch.float32
    assert state_cache.dtype is torch.float32 and state_cache[0].is_contiguous()
    sizes = (heads, head_dim, num_groups, state_size)
    check_pending(pending, len(state_cache), tokens_since_a_chunk(xbc.dtype, *sizes))
