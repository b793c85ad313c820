"""Low-rank adapters: what they add to the products of a step, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from vllm.forward_context import (
    RowAdapters,
    current_adapters,
    get_forward_context,
    set_forward_context,
)
from vllm.model_executor.layers.weight import Weight
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
        if rows is None:
            outputs += change
        else:
            outputs[rows] = (outputs[rows] + change).to(out.dtype)


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter."""

    digest: str
    """Identifies its content."""
    parts: Mapping[tuple[Weight, int], Sequence[LowRank]]
    """By weight and table of the weight."""


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """The adapters of the rows that products have in a step, or in a part of it."""

    adapters: Sequence[Adapter]
    index: torch.Tensor
    """int64 [rows] on the host: the index of each row's adapter; -1: it has none."""
    device: torch.device

    def add(self, weight: Weight, table: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add what adapters change in a product with a weight. x: [rows, n]; out: [rows, m]."""
        if not any((weight, table) in adapter.parts for adapter in self.adapters):
            return
        if len(x) != len(self.index):
            raise RuntimeError(
                f"a product of {len(x)} rows in a pass of {len(self.index)}: adapters of this "
                "weight are not supported"
            )
        for adapter, rows in self._groups:
            for part in adapter.parts.get((weight, table), ()):
                part.add(x, rows, out)

    def part(self, rows: torch.Tensor | slice) -> AdapterRows:
        """Return those of products that have only some rows, or have them repeatedly."""
        own = self.index[rows if isinstance(rows, slice) else rows.cpu()]
        return AdapterRows(self.adapters, own, self.device)

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


def only_rows(rows: torch.Tensor | slice) -> AbstractContextManager[object]:
    """Return a block whose products have only some rows of the pass, or have them repeatedly."""
    adapters = current_adapters()
    return nullcontext() if adapters is None else _only(adapters, rows)


@contextmanager
def _only(adapters: RowAdapters, rows: torch.Tensor | slice) -> Iterator[None]:
    with set_forward_context(replace(get_forward_context(), adapters=adapters.part(rows))):
        yield
