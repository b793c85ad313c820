"""The operations as functions that return new tensors, with one source of implementations.

What a test compares is then ``kernels.rms_norm(x, weight, 1e-6)`` of two sources. Results are
poisoned before they are written, contracts are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm.ops import (
    activations,
    attention,
    experts,
    linear,
    norms,
    packed_linear,
    recurrent,
    rotary,
    row_transport,
    rows,
    sampling,
    state_space,
)
from vllm.ops.layout import SequenceLayout, StatePlan, StateTensor, new_rows_apart
from vllm.ops.native import BASELINE, NativeKernelsUnavailable, load_library
from vllm.ops.operation import KERNEL_DTYPES, Operation, Source
from vllm.ops.row_transport import HostRows, RowReport
from vllm.ops.sources import OverrideSource

ISA_NAMES = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16", "neon")

ISAS_OF_PAIRS = ("avx512_bf16", "amx_bf16")
"""Instruction sets that multiply bfloat16 in pairs of terms."""


def poisoned(like: torch.Tensor, shape: Sequence[int] | torch.Size) -> torch.Tensor:
    """A new tensor of NaN (integers: of a number that is no index)."""
    made = like.new_empty(tuple(shape))
    return made.fill_(float("nan") if made.is_floating_point() else -(2**30))


class Kernels:
    """Every operation, from one source."""

    def __init__(self, source: Source, device_type: str = "cpu") -> None:
        self.source = source
        self.name = source.name
        self.device_type = device_type

    @property
    def isa(self) -> str:
        return getattr(self.source, "isa", BASELINE)

    def implementation(self, operation: Operation[Any]) -> Callable[..., None]:
        return self.source.find(operation) or operation.body

    def _run(self, operation: Operation[Any], *args: Any) -> None:
        operation.run(self.implementation(operation), *args)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        columns: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """``columns``: of a weight that is given as panels."""
        out = poisoned(x, (x.shape[0], weight.shape[0] if columns is None else columns))
        self._run(linear.linear, x, weight, bias, out)
        return out

    def packed_linear(
        self, x: torch.Tensor, panels: packed_linear.PackedPanels, group_size: int,
        bias: torch.Tensor | None, columns: int, x_scales: torch.Tensor | None = None,
        x_is_whole: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        out = poisoned(x, (x.shape[0], columns))
        operation = packed_linear.packed_linear
        self._run(operation, x, panels, group_size, x_scales, x_is_whole, bias, out)
        return out

    def expert_linear(
        self, x: torch.Tensor, rows: torch.Tensor | None, starts: torch.Tensor,
        weight: torch.Tensor, bias: torch.Tensor | None = None, columns: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """weight: [num_experts, m, n], or the panels of each expert and m, ``columns``."""
        shape = (len(x) if rows is None else len(rows), columns or weight.shape[1])
        out = poisoned(x, shape)
        self._run(experts.expert_linear, x, rows, starts, weight, bias, out)
        return out

    def panel_embedding(
        self, token_ids: torch.Tensor, panels: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        """Rows of a table of that shape."""
        out = poisoned(panels, (len(token_ids), shape[1]))
        self._run(linear.panel_embedding, token_ids, panels, shape[0], out)
        return out

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        out = poisoned(logits.new_empty(0, dtype=torch.int64), (len(logits),))
        self._run(sampling.most_likely, logits, out)
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        out = poisoned(x, x.shape)
        self._run(norms.rms_norm, x, weight, eps, offset, out)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
        offset: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        out = poisoned(x, x.shape)
        self._run(norms.add_rms_norm, x, residual, weight, eps, offset, out)
        return out

    def gated_rms_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = poisoned(x, x.shape)
        self._run(norms.gated_rms_norm, x, gate, weight, eps, out)
        return out

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        out = poisoned(x, (x.shape[0], x.shape[1] // 2))
        self._run(activations.silu_and_mul, x, out)
        return out

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        out = poisoned(x, x.shape)
        self._run(activations.sigmoid_gate, x, gate, out)
        return out

    def norm_and_rotate(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor], eps: float, offset: float,
        cos_sin: torch.Tensor, interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        outs = poisoned(query, query.shape), poisoned(key, key.shape)
        scaling = (*weights, eps, offset)
        args = (positions, query, key, *scaling, cos_sin, interleaved, *outs)
        self._run(rotary.norm_and_rotate, *args)
        return outs

    def rotary_embedding(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
        cos_sin: torch.Tensor, interleaved: bool,
    ) -> None:  # fmt: skip
        self._run(rotary.rotary_embedding, positions, query, key, cos_sin, interleaved)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self._run(attention.write_kv, key, value, slots, kv_cache)

    def paged_attention(
        self, query: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor,
        layout: SequenceLayout, scale: float, sliding_window: int | None = None,
        soft_cap: float | None = None, sinks: torch.Tensor | None = None,
        *, value_offset: int | None = None, value_size: int | None = None,
        attend: Callable[..., None] | None = None, chunk: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Values lie behind the keys if nothing else is said; ``attend``: another backend."""
        tokens, heads, key_size = query.shape
        out = poisoned(query, (tokens, heads, value_size or kv_cache.shape[4] - key_size))
        offset = key_size if value_offset is None else value_offset
        if sinks is not None and sinks.dtype not in KERNEL_DTYPES:
            sinks = sinks.float()  # as the layer does
        args = (query, kv_cache, block_table, layout, scale, offset, sliding_window, chunk,
                soft_cap, sinks, out)  # fmt: skip
        if attend is not None:
            attention.paged_attention.run(attend, *args)
        else:
            self._run(attention.paged_attention, *args)
        return out

    def copy_blocks(
        self, pool: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor
    ) -> None:
        self._run(rows.copy_blocks, sources, destinations, pool)

    def causal_conv1d(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        state_cache: torch.Tensor, layout: SequenceLayout, states: StatePlan,
        applies_silu: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        out = new_rows_apart(x)
        out.fill_(float("nan"))
        self._run(recurrent.causal_conv1d, x, weight, bias, applies_silu, layout, states,
                  state_cache, out)  # fmt: skip
        return out

    def gated_delta_rule(
        self, qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor,
        dt_bias: torch.Tensor, state_cache: torch.Tensor, num_k_heads: int,
        layout: SequenceLayout, states: StatePlan, pending: Sequence[torch.Tensor] = (),
        beta_scale: float = 1.0,
    ) -> torch.Tensor:  # fmt: skip
        out = poisoned(qkv, (len(qkv), state_cache.shape[1], state_cache.shape[3]))
        self._run(recurrent.gated_delta_rule, qkv, a, b, a_log, dt_bias, num_k_heads, beta_scale,
                  layout, states, state_cache, list(pending), out)  # fmt: skip
        return out

    def delta_rule_pending(
        self, dtype: torch.dtype, num_k_heads: int, num_v_heads: int, dk: int, dv: int
    ) -> tuple[StateTensor, ...]:
        if not self.source.keeps_pending or dtype is torch.float32:
            return ()
        return recurrent.tokens_since_a_chunk(dtype, num_k_heads, num_v_heads, dk, dv)

    def state_space_pending(
        self, dtype: torch.dtype, heads: int, head_dim: int, num_groups: int, state_size: int
    ) -> tuple[StateTensor, ...]:
        if not self.source.multiplies_pairs or dtype is not torch.bfloat16:
            return ()
        return state_space.tokens_since_a_chunk(dtype, heads, head_dim, num_groups, state_size)

    def capture_rows(
        self, row_cache: torch.Tensor, slots: torch.Tensor, column: int, hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self._run(rows.capture_rows, hidden, residual, slots, column, row_cache)

    def find_bad_cells(self, found: torch.Tensor) -> torch.Tensor:
        report = torch.empty(2, dtype=torch.int64)
        self._run(rows.find_bad_cells, found, report)
        return report

    def gather_rows(
        self, row_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
    ) -> RowReport:
        report = torch.full((2,), -(2**30))
        self._run(rows.gather_rows, row_cache, slots, out, report)
        return row_transport._report(report, out.shape[1])

    def inspect_rows(self, found: torch.Tensor) -> RowReport:
        return HostRows().inspect(found)


class _OneOtherSource(Source):
    def __init__(self, operation: Operation[Any], implementation: Callable[..., None]) -> None:
        self._other = {operation.name: implementation}

    def find(self, operation: Operation[Any]) -> Callable[..., None] | None:
        return self._other.get(operation.name)


def one_other(operation: Operation[Any], implementation: Callable[..., None]) -> Kernels:
    """The plain kernels with another implementation of one operation."""
    return Kernels(_OneOtherSource(operation, implementation))


def plain_kernels() -> Kernels:
    """The bodies of the operations."""
    return Kernels(Source())


def native_kernels(isa: str | None = None) -> Kernels:
    """The library of one instruction set; NativeKernelsUnavailable, ValueError: there is none."""
    return Kernels(load_library(isa))


def triton_kernels() -> Kernels:
    """The kernels in Triton; without a card the interpreter runs them."""
    import vllm.ops.cuda  # noqa: F401  its overrides

    return Kernels(OverrideSource("triton", "cuda"), "cuda")


__all__ = [
    "BASELINE",
    "ISA_NAMES",
    "Kernels",
    "NativeKernelsUnavailable",
    "native_kernels",
    "one_other",
    "plain_kernels",
    "poisoned",
    "triton_kernels",
]
