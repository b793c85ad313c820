"""Whole chunks of the gated delta rule through flash-linear-attention.

The library takes dense sequences with dense states, so states are gathered from the pool
and scattered back. A request is cut wherever a state is to be kept: there is one call
(*round*) for the first pieces of all requests, one for the second pieces, and so on.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from vllm.ops.cuda.triton_recurrent_pieces import CHUNK, DeltaRuleCall
from vllm.ops.layout import HostStates, StatePlan
from vllm.ops.plain_math import sigmoid, softplus


class Round(NamedTuple):
    """Pieces of requests that do not depend on each other; lists have an entry per piece."""

    starts: list[int]
    """First token of the piece in the flat batch."""
    lengths: list[int]
    """Tokens of the piece, a multiple of the chunk."""
    blocks: list[int]
    """Block that the state is read from and written to."""
    has_state: list[bool]
    kept_before: list[tuple[int, int]]
    """(piece, block): the block also gets the state before the piece."""
    kept_after: list[tuple[int, int]]


class _Tables(NamedTuple):
    """A :class:`Round` on the device; int64 unless stated otherwise."""

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    chunk_indices: torch.Tensor
    """[chunks, 2]: piece, chunk in it."""
    blocks: torch.Tensor
    has_state: torch.Tensor
    """[pieces, 1, 1, 1], bool."""
    kept_before: torch.Tensor
    """[2, kept]: pieces, blocks."""
    kept_after: torch.Tensor


def plan_rounds(query_start: list[int], seq_lens: list[int], host: HostStates) -> list[Round]:
    """Cut the whole chunks (see ``triton_recurrent_pieces``) of a step at its snapshots.

    The block of a snapshot gets the state at the last chunk boundary at or before it.
    """
    rounds: list[Round] = []
    for r, block in enumerate(host.block_ids):
        computed = seq_lens[r] - (query_start[r + 1] - query_start[r])
        before = -computed % CHUNK
        start = query_start[r] + before
        length = (query_start[r + 1] - start) // CHUNK * CHUNK
        if length <= 0:
            continue
        kept: dict[int, list[int]] = {}
        for tokens, target in host.snapshots[r]:
            if 0 < tokens - before <= length:
                kept.setdefault((tokens - before) // CHUNK * CHUNK, []).append(target)
        bounds = sorted({0, length, *kept})
        for i, (low, high) in enumerate(itertools.pairwise(bounds)):
            if i == len(rounds):
                rounds.append(Round([], [], [], [], [], []))
            step = rounds[i]
            piece = len(step.starts)
            step.starts.append(start + low)
            step.lengths.append(high - low)
            step.blocks.append(block)
            step.has_state.append(computed + before + low > 0)
            if i == 0:
                step.kept_before.extend((piece, target) for target in kept.get(0, []))
            step.kept_after.extend((piece, target) for target in kept.get(high, []))
    return rounds


def _to_device(step: Round, device: torch.device) -> _Tables:
    """Copy a round to the device in one copy, which on CUDA does not wait."""
    lengths = np.asarray(step.lengths)
    ends = np.cumsum(lengths)
    pieces = np.arange(len(lengths))
    inside = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    tokens = np.repeat(np.asarray(step.starts), lengths) + inside
    chunks = np.stack((np.repeat(pieces, lengths // CHUNK), inside[::CHUNK] // CHUNK), 1)
    parts = [
        tokens,
        np.concatenate(([0], ends)),
        chunks,
        np.asarray(step.blocks),
        np.asarray(step.has_state).reshape(-1, 1, 1, 1),
        np.asarray(step.kept_before, dtype=np.int64).reshape(-1, 2).T,
        np.asarray(step.kept_after, dtype=np.int64).reshape(-1, 2).T,
    ]
    flat = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]).astype(np.int64))
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    split = torch.split(flat, [part.size for part in parts])
    shaped = [x.view(part.shape) for x, part in zip(split, parts, strict=True)]
    shaped[4] = shaped[4].bool()
    return _Tables(*shaped)


_SPLITS_BY_BATCH = "FLA_INTRACARD_CP"

_tables: WeakKeyDictionary[StatePlan, list[_Tables]] = WeakKeyDictionary()
"""Tables by plan: the layers of a group share one."""


def _tables_of(call: DeltaRuleCall) -> list[_Tables]:
    tables = _tables.get(call.states)
    if tables is None:
        query_start, seq_lens = (x.tolist() for x in call.layout.on_host())
        rounds = plan_rounds(query_start, seq_lens, call.states.on_host())
        tables = [_to_device(step, call.qkv.device) for step in rounds]
        _tables[call.states] = tables
    return tables


@functools.cache
def _chunk_function() -> Any:
    """``fla.ops.gated_delta_rule.chunk_gated_delta_rule``; ImportError if it is not installed."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    # Earlier versions wait for the device while they build their tables of chunks.
    if "chunk_indices" not in inspect.signature(chunk_gated_delta_rule).parameters:
        raise ImportError("flash-linear-attention is older than 0.6")
    return chunk_gated_delta_rule


@functools.cache
def why_unavailable() -> str | None:
    """The reason why flash-linear-attention cannot be used; None if it can."""
    if os.environ.get(_SPLITS_BY_BATCH, "0") not in ("", "0"):
        return (
            f"{_SPLITS_BY_BATCH}={os.environ[_SPLITS_BY_BATCH]} makes it wait for the device, and "
            "split a prompt depending on what runs beside it; unset it"
        )
    try:
        _chunk_function()
    except ImportError as error:
        return str(error)
    return None


def run_chunks(call: DeltaRuleCall) -> None:
    """Compute the whole chunks of a step: fill their rows of ``out`` and advance the states.

    ``qkv`` must be bfloat16 or float16.
    """
    num_v_heads, dk, dv = call.state_cache.shape[1:]
    heads = (call.num_k_heads, call.num_k_heads, num_v_heads)
    sizes = [heads[0] * dk, heads[1] * dk, heads[2] * dv]
    rate = -torch.exp(call.a_log.float())
    for table in _tables_of(call):
        tokens = table.tokens
        q, k, v = (
            part[tokens].view(1, tokens.shape[0], count, -1)
            for part, count in zip(torch.split(call.qkv, sizes, dim=1), heads, strict=True)
        )
        log_decay = rate * softplus(call.a[tokens].float() + call.dt_bias.float())
        beta = call.beta_scale * sigmoid(call.b[tokens].float())
        gathered = call.state_cache[table.blocks]
        initial = torch.where(table.has_state, gathered, torch.zeros_like(gathered))
        pieces, blocks = table.kept_before
        call.state_cache[blocks] = initial[pieces]
        rows, final = _chunk_function()(
            *(q, k, v, log_decay.unsqueeze(0), beta.unsqueeze(0)),
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=table.cu_seqlens,
            chunk_indices=table.chunk_indices,
        )
        call.out[tokens] = rows[0]
        call.state_cache[table.blocks] = final
        pieces, blocks = table.kept_after
        call.state_cache[blocks] = final[pieces]
