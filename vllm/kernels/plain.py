"""The kernels in plain torch: the reference of the tests, and the fallback."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn import functional

from vllm.kernels import plain_attention, plain_recurrent
from vllm.kernels.base import (
    PendingReport,
    Record,
    RowReport,
    SequenceLayout,
    StatePlan,
    StateTensor,
)
from vllm.kernels.plain_linear import row_invariant_linear
from vllm.kernels.plain_math import sigmoid, silu


class PlainKernels:
    """Every operation of :class:`vllm.kernels.base.Kernels`, for any device.

    What the methods mean, and the shapes of their arguments, stands at the protocol.
    """

    name = "plain"

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return row_invariant_linear(x, weight, bias)

    def pack_weight(self, weight: torch.Tensor) -> torch.Tensor | None:
        return None

    def pack_table(self, table: torch.Tensor) -> torch.Tensor | None:
        return None

    def embedding(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return functional.embedding(token_ids, table)

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        # Dense rows: a reduction over them is then the same work for every row.
        rows = x.float().contiguous()
        mean_square = (rows * rows).sum(dim=-1, keepdim=True) / x.shape[-1]
        normalised = rows * torch.rsqrt(mean_square + eps)
        if weight is None:
            return normalised.to(x.dtype)
        if offset == 0.0:
            return (normalised.to(x.dtype).float() * weight.float()).to(x.dtype)
        return (normalised * (weight.float() + offset)).to(x.dtype)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
    ) -> torch.Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps, offset)

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return (self.rms_norm(x, weight, eps).float() * silu(gate.float())).to(x.dtype)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return (silu(gate.float()) * up.float()).to(x.dtype)

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x.float() * sigmoid(gate.float())).to(x.dtype)

    def rotary_embedding(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        cos_sin: torch.Tensor,
        interleaved: bool,
    ) -> None:
        rotary_dim = cos_sin.shape[1]
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
        for heads in (query, key):
            if interleaved:
                first, second = heads[..., 0:rotary_dim:2], heads[..., 1:rotary_dim:2]
            else:
                first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
            x, y = first.float(), second.float()
            rotated = x * cos - y * sin
            second.copy_(y * cos + x * sin)
            first.copy_(rotated)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        plain_attention.write_kv(key, value, kv_cache, slots)

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        layout: SequenceLayout,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return plain_attention.paged_attention(
            query, kv_cache, block_table, layout, scale, sliding_window, soft_cap, sinks
        )

    def copy_blocks(
        self, pool: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor
    ) -> None:
        copy_blocks(pool, sources, destinations)

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state_cache: torch.Tensor,
        layout: SequenceLayout,
        states: StatePlan,
    ) -> torch.Tensor:
        return plain_recurrent.causal_conv1d(x, weight, bias, state_cache, layout, states)

    def gated_delta_rule(
        self,
        qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        state_cache: torch.Tensor,
        num_k_heads: int,
        layout: SequenceLayout,
        states: StatePlan,
        pending: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        assert not pending
        return plain_recurrent.gated_delta_rule(
            qkv, a, b, a_log, dt_bias, state_cache, num_k_heads, layout, states
        )

    def delta_rule_pending(
        self, dtype: torch.dtype, num_k_heads: int, num_v_heads: int, dk: int, dv: int
    ) -> tuple[StateTensor, ...]:
        return ()

    def capture_rows(
        self,
        row_cache: torch.Tensor,
        slots: torch.Tensor,
        column: int,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:
        rows_per_block = row_cache.shape[1]
        stream = hidden if residual is None else hidden + residual
        written = (slots >= 0).nonzero().squeeze(1)
        slots = slots[written]
        cells = row_cache[:, :, column]
        cells[slots // rows_per_block, slots % rows_per_block] = stream[written].to(row_cache.dtype)

    def gather_rows(
        self, row_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> PendingReport:
        rows_per_block = row_cache.shape[1]
        out.copy_(row_cache[slots // rows_per_block, slots % rows_per_block])
        return inspect_rows(out)

    def beside(self, rows: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def inspect_rows(self, rows: torch.Tensor) -> PendingReport:
        return inspect_rows(rows)

    def leaving_rows_bytes(self, token_bytes: int) -> int:
        return 0

    def attention_scratch_bytes(self, max_seq_len: int) -> int:
        return 0

    def record_calls(self) -> Record | None:
        return None


_COPY_SLICE_BYTES = 64 * 2**20


def copy_blocks(pool: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """See :meth:`vllm.kernels.base.Kernels.copy_blocks`."""
    # In slices: the blocks in between stand outside the pool.
    per_slice = max(1, _COPY_SLICE_BYTES // pool.shape[1])
    for start in range(0, len(sources), per_slice):
        part = slice(start, start + per_slice)
        pool[destinations[part]] = pool[sources[part]]


def inspect_rows(rows: torch.Tensor) -> RowReport:
    """See :meth:`vllm.kernels.base.Kernels.inspect_rows`; for rows on the host."""
    nonfinite = _first_cell(~torch.isfinite(rows).all(dim=-1))
    return RowReport(*nonfinite, *_first_cell((rows == 0).all(dim=-1)))


def _first_cell(found: torch.Tensor) -> tuple[int, int]:
    """(row, column) of the first True in row order; (-1, -1) when there is none."""
    cells = found.flatten().nonzero()
    if cells.shape[0] == 0:
        return -1, -1
    return divmod(int(cells[0]), found.shape[1])
