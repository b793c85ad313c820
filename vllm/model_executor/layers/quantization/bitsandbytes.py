"""Formats of bitsandbytes: NF4 and FP4 in blocks, and rows of INT8.

Sources: arXiv 2305.14314 (NF4, scales that are quantised again), arXiv 2208.07339 (LLM.int8).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch

from vllm.model_executor.layers.quantization.storage_format import (
    FormatOf,
    Reader,
    StorageFormat,
    join_halves,
)
from vllm.ops.operation import KERNEL_DTYPES
from vllm.ops.packed_linear import PackedWeight

_WEIGHT = "weight."
_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_TWELFTHS = 12
"""Every value of FP4 is a whole number of twelfths."""


def read_bitsandbytes(config: Mapping[str, Any]) -> FormatOf:
    """Read the formats off the modules' tensors; the config only says how they were made."""
    blocks, rows = BlocksFormat(), RowsFormat()

    def format_of(module: str, names: Collection[str]) -> StorageFormat | None:
        module = module.removesuffix(".quant_state").removesuffix(".weight")
        if f"{module}.SCB" in names:
            return rows
        is_in_blocks = any(f"{module}.{leaf}" in names for leaf in (*_STATES, "weight.absmax"))
        return blocks if is_in_blocks else None

    return format_of


class RowsFormat(StorageFormat):
    """``weight`` int8 [m, n]; ``SCB`` float32 [m]: ``code * SCB / 127``."""

    name = "INT8 of bitsandbytes"
    required: ClassVar[tuple[str, ...]] = ("weight", "SCB")
    optional = ("weight_format",)
    takes_one_scale = False

    def unpack(self, stored: Reader) -> PackedWeight:
        codes = stored.get("weight", (torch.int8,), (None, None))
        rows, columns = codes.shape
        largest = stored.by_group("SCB", (rows, 1), KERNEL_DTYPES)
        if stored.has("weight_format") and stored.get("weight_format", (torch.uint8,)).any():
            raise stored.fail("weight_format", "is not 0; supported: weights row by row")
        return PackedWeight(codes, largest.float() / 127, columns, columns)


class BlocksFormat(StorageFormat):
    """The weight [m, n] as one line, cut into blocks: ``quant_map[code] * absmax``.

    ``weight``: two codes per byte, the first one in the high half; ``weight.absmax``: one per
    block, float32, or uint8 if quantised again: ``nested_quant_map[code] * nested_absmax`` of
    larger blocks, plus an offset; ``weight.quant_state.bitsandbytes__KIND``: shape and sizes of
    blocks as JSON.
    """

    name = "4 bits of bitsandbytes"
    required: ClassVar[tuple[str, ...]] = ("weight", "weight.absmax", "weight.quant_map")
    optional = (*_NESTED, *_STATES)

    def split(self, name: str) -> tuple[str, str] | None:
        module, dot, leaf = name.rpartition("." + _WEIGHT)
        if not dot:
            return super().split(name)
        return (module, _WEIGHT + leaf) if _WEIGHT + leaf in self.leaves else None

    def unpack(self, stored: Reader) -> PackedWeight:
        state = _State(stored)
        rows, columns = state.shape
        held = stored.get("weight", (torch.uint8, *KERNEL_DTYPES)).contiguous().flatten()
        packed = held.view(torch.uint8)
        if len(packed) != -(-rows * columns // 2):
            raise stored.fail("weight", f"has {len(packed)} bytes for {rows} x {columns} codes")
        codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[: rows * columns]
        # A group lies in one block and in one row.
        group_size = math.gcd(columns, state.block_size)
        blocks = torch.arange(0, rows * columns, group_size) // state.block_size
        scales = state.scales()[blocks].view(rows, columns // group_size)
        table = state.table()
        if state.kind == "fp4":
            table, scales = (table * _TWELFTHS * 16).round() / 16, scales / _TWELFTHS
        codes = join_halves(codes.view(rows, columns))
        return PackedWeight(codes, scales, columns, group_size, tuple(table.tolist()))


class _State:
    """The tensors of a module beside its codes."""

    def __init__(self, stored: Reader) -> None:
        self._stored = stored
        leaf = next(filter(stored.has, _STATES), None)
        if leaf is None:
            raise stored.fail(_STATES[0], "is missing, and with it the weight's shape")
        self.kind = leaf.rpartition("__")[2]
        try:
            given = json.loads(bytes(stored.get(leaf, (torch.uint8,), (None,)).tolist()))
            rows, columns = map(int, given["shape"])
            self.shape, self.block_size = (rows, columns), int(given["blocksize"])
            self._nested_size = int(given.get("nested_blocksize") or 0)
            self._offset = float(given.get("nested_offset") or 0.0)
        except (ValueError, TypeError, KeyError) as error:
            raise stored.fail(
                leaf, f"does not tell shape and blocksize as JSON: {error!r}"
            ) from error
        sizes = (*self.shape, self.block_size, self._nested_size + 1)
        if min(sizes) < 1 or not math.isfinite(self._offset):
            raise stored.fail(leaf, f"holds a size or an offset that none can have: {given}")

    def table(self) -> torch.Tensor:
        """The 16 values of codes."""
        self._stored.get("weight.quant_map", (torch.float32,), (16,))
        return self._stored.finite("weight.quant_map")

    def scales(self) -> torch.Tensor:
        """One scale per block, float32."""
        stored, shape = self._stored, (self._blocks(math.prod(self.shape), self.block_size),)
        if not any(map(stored.has, _NESTED)):
            stored.get("weight.absmax", (torch.float32,), shape)
            return stored.finite("weight.absmax")
        codes = stored.get("weight.absmax", (torch.uint8,), shape)
        for leaf in _NESTED:
            if not stored.has(leaf):
                raise stored.fail(leaf, "is missing, and scales are quantised again")
        if not self._nested_size:
            raise stored.fail(_NESTED[0], "is there, but no nested_blocksize in its state")
        stored.get(_NESTED[0], (torch.float32,), (self._blocks(len(codes), self._nested_size),))
        stored.get(_NESTED[1], (torch.float32,), (256,))
        largest = stored.finite(_NESTED[0]).repeat_interleave(self._nested_size)[: len(codes)]
        return stored.finite(_NESTED[1])[codes.long()] * largest + self._offset

    @staticmethod
    def _blocks(elements: int, size: int) -> int:
        return -(-elements // size)
