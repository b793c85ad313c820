"""Low-rank adapters: what they add to the products of a step, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from vllm.model_executor.layers.weight import Weight
from vllm.ops.linear import linear_by_head
from vllm.utils.transfers import to_device


class LowRank(NamedTuple):
    """Adds ``up (down x)`` to some consecutive outputs of a weight; both products in float32."""

    down: Weight
    """[rank, inputs]"""
    up: Weight
    """[outputs, rank], times the adapter's scale."""
    start: int
    """The first of these outputs."""

    def add(self, x: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor) -> None:
        """Change rows of ``out`` [tokens, m] by those of ``x`` [tokens, n]; None: all rows."""
        outputs = out[:, self.start : self.start + self.up.shape[0]]
        change = self.up.multiply(self.down.multiply((x if rows is None else x[rows]).float()))
        _add(change, rows, outputs)


class LowRankRows(NamedTuple):
    """Adds ``up table[id]`` to rows that were looked up, in float32."""

    table: torch.Tensor
    """float32 [vocabulary, rank]"""
    up: Weight
    """[width, rank], times the adapter's scale."""

    def add(self, ids: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor) -> None:
        """Change rows of ``out`` [tokens, width] by ``ids``, int64 [tokens]; None: all rows."""
        chosen = ids if rows is None else ids[rows]
        # Ids of tokens without a text, where rows came with the request, may lie outside.
        _add(self.up.multiply(self.table[chosen.clamp(0, len(self.table) - 1)]), rows, out)


class LowRankHeads(NamedTuple):
    """Changes keys and values that heads make of latents, ``up (down latent)``; they are never
    computed, so queries and mixtures of latents are multiplied instead. All in float32."""

    down: Weight
    """[rank, latent]"""
    down_transposed: Weight
    """[latent, rank]"""
    keys: torch.Tensor
    """The rows of ``up`` that are keys', transposed: [heads, rank, key], or their panels."""
    values: torch.Tensor
    """The rows that are values': [heads, value, rank], or their panels."""

    def add_to_queries(
        self, heads: slice, query: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Change some heads' queries in the latents' space. query: [tokens, heads, key]; out:
        [tokens, heads, latent]; rows: as for :class:`LowRank`."""
        x = (query if rows is None else query[rows]).float().contiguous()
        inner = x.new_empty((*x.shape[:2], self.down.shape[0]))
        linear_by_head(x, self.keys[heads], inner)
        change = self.down_transposed.multiply(inner.flatten(0, 1)).view(*x.shape[:2], -1)
        _add(change, rows, out)

    def add_to_values(
        self, heads: slice, mixed: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """Change some heads' values. mixed: [tokens, heads, latent]; out: [tokens, heads, value]"""
        x = (mixed if rows is None else mixed[rows]).float()
        inner = self.down.multiply(x.flatten(0, 1)).view(*x.shape[:2], -1)
        change = x.new_empty((*x.shape[:2], out.shape[2]))
        linear_by_head(inner, self.values[heads], change)
        _add(change, rows, out)


def _add(change: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor) -> None:
    """Add to rows of ``out``, and round once; None: all rows."""
    if rows is None:
        out += change
    else:
        out[rows] = (out[rows] + change).to(out.dtype)


EMBEDDING = -1
"""The number of a weight's look-ups among its tables: a tied head multiplies with table 0."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter."""

    digest: str
    """Identifies its content."""
    parts: Mapping[tuple[Weight, int, int], Sequence[LowRank | LowRankRows | LowRankHeads]]
    """By weight, table of the weight, and use of the module (0, unless layers share it)."""
    has_tables: bool = False
    """True if its files have tables of the model, which it can be used with only."""


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """The adapters of the rows that products have in a step, or in a part of it."""

    adapters: Sequence[Adapter]
    index: torch.Tensor
    """int64 [rows] on the host: the index of each row's adapter; -1: it has none."""
    device: torch.device
    use: int = 0
    """The number of the use, for products of modules that several layers share."""

    def add(self, weight: Weight, table: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add what adapters change in a product with a weight. x: [rows, n]; out: [rows, m]."""
        for part, rows in self.parts_of(weight, table, len(x)):
            part.add(x, rows, out)

    def parts_of(
        self, weight: Weight, table: int, num_rows: int
    ) -> Iterator[tuple[Any, torch.Tensor | None]]:
        """Yield the adapters' parts for a product of so many rows, each with its rows; None: all.

        RuntimeError: the product has not the rows of this pass.
        """
        key = (weight, table, self.use)
        if not any(key in adapter.parts for adapter in self.adapters):
            return
        if num_rows != len(self.index):
            raise RuntimeError(
                f"a product of {num_rows} rows in a pass of {len(self.index)}: adapters of this "
                "weight are not supported"
            )
        for adapter, rows in self._groups:
            for part in adapter.parts.get(key, ()):
                yield part, rows

    def part(self, rows: torch.Tensor | slice) -> AdapterRows:
        """Return those of products that have only some rows, or have them repeatedly."""
        own = self.index[rows if isinstance(rows, slice) else rows.cpu()]
        return replace(self, index=own)

    def of_use(self, use: int) -> AdapterRows:
        """Return those of one use of modules that several layers share."""
        return replace(self, use=use)

    @cached_property
    def _groups(self) -> list[tuple[Adapter, torch.Tensor | None]]:
        """Each adapter with its rows, int64; None: all rows."""
        found = []
        for number, adapter in enumerate(self.adapters):
            rows = (self.index == number).nonzero().squeeze(1)
            if len(rows):
                is_whole = len(rows) == len(self.index)
                found.append((adapter, None if is_whole else to_device(rows.numpy(), self.device)))
        return found
