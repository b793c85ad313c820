"""FP8 (E4M3), ``code * scale``, with one scale per tensor, row, group of a row, or block."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

import torch

from vllm.model_executor.layers.quantization.storage_format import (
    FormatOf,
    Reader,
    StorageFormat,
)
from vllm.ops.operation import KERNEL_DTYPES
from vllm.ops.packed_linear import PackedExperts, PackedWeight
from vllm.ops.served_activations import ServedActivations

EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
"""Weights of all experts if each projection is one tensor."""

_ZERO = "weight_zero_point"
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
_SCALE_DTYPES = (*KERNEL_DTYPES, torch.float8_e8m0fnu)
_ZERO_DTYPES = (*KERNEL_DTYPES, torch.float8_e4m3fn, torch.int8, torch.uint8)


class Fp8Format(StorageFormat):
    """``weight`` float8_e4m3fn [m, n]; ``weight_scale_inv`` or ``weight_scale``, which multiplies.

    block: rows and columns of a block; None: a scale per tensor, row, or ``group_size`` columns.
    """

    name = "FP8"
    required: ClassVar[tuple[str, ...]] = ("weight",)
    optional = (*_SCALE_NAMES, _ZERO)

    def __init__(
        self,
        block: tuple[int, int] | None = None,
        group_size: int | None = None,
        activations: ServedActivations | None = None,
    ) -> None:
        self.block, self.group_size, self.activations = block, group_size, activations

    def unpack(self, stored: Reader) -> PackedWeight | PackedExperts:
        return self._unpack_one(stored)

    def _unpack_one(self, stored: Reader) -> PackedWeight:
        codes = stored.get("weight", (torch.float8_e4m3fn,), (None, None))
        given = [leaf for leaf in _SCALE_NAMES if stored.has(leaf)]
        if len(given) != 1:
            what = "has none of" if not given else "has both"
            raise stored.fail("weight", f"{what} {' and '.join(_SCALE_NAMES)}; one is needed")
        scales, group_size = self._scales_by_row(stored, given[0], codes.shape)
        if stored.has(_ZERO) and stored.finite(_ZERO, _ZERO_DTYPES).float().any():
            raise stored.fail(_ZERO, "is not 0; FP8 codes have no zero point")
        stored.check_no_nan_codes("weight", codes)
        return PackedWeight(codes, scales, codes.shape[1], group_size)

    def _scales(self, stored: Reader, leaf: str) -> torch.Tensor:
        return stored.finite(leaf, _SCALE_DTYPES)

    def _scales_by_row(
        self, stored: Reader, leaf: str, shape: torch.Size
    ) -> tuple[torch.Tensor, int]:
        rows, columns = shape
        scales = self._scales(stored, leaf)
        if scales.dtype not in KERNEL_DTYPES:
            scales = scales.float()
        takes_one = self.takes_one_scale and (self.block is None or scales.dim() < 2)
        if takes_one and scales.numel() == 1:
            return scales.reshape(1, 1).expand(rows, 1), columns
        block_rows, block_columns = self.block or (1, self.group_size or columns)
        expected = (-(-rows // block_rows), -(-columns // block_columns))
        if scales.dim() == 4:  # ModelOpt: [blocks, 1, blocks, 1]
            scales = scales.squeeze(3).squeeze(1)
        if tuple(scales.shape) not in (expected, expected[:1] if expected[1] == 1 else expected):
            raise stored.fail(
                leaf,
                f"has shape {tuple(scales.shape)}, expected {expected} for a weight of "
                f"{tuple(shape)} in blocks of {block_rows} x {block_columns}"
                + (", or one scale" if self.takes_one_scale else ""),
            )
        by_row = scales.reshape(expected).repeat_interleave(block_rows, 0)[:rows]
        return by_row, block_columns


class Mxfp8Format(Fp8Format):
    """A power of two for every 32 columns of a row, ``weight_scale`` uint8 [m, n / 32]."""

    name = "MXFP8"
    takes_one_scale = False

    def __init__(self) -> None:
        super().__init__(group_size=32)

    def _scales(self, stored: Reader, leaf: str) -> torch.Tensor:
        return stored.powers_of_two(leaf)


class Fp8ExpertsFormat(Fp8Format):
    """All experts' weights in one tensor: ``NAME`` float8_e4m3fn [experts, m, n],
    ``NAME_scale_inv`` [experts, scales as of one weight].
    """

    separator = "_"
    _suffixes: ClassVar[Mapping[str, str]] = {"weight": "", "weight_scale_inv": "_scale_inv"}

    @property
    def leaves(self) -> tuple[str, ...]:
        return tuple(self._suffixes)

    def split(self, name: str) -> tuple[str, str] | None:
        module = name.removesuffix("_scale_inv")
        if module.rpartition(".")[2] not in EXPERTS:
            return None
        return module, "weight" if module == name else "weight_scale_inv"

    def tensor_name(self, module: str, leaf: str) -> str:
        return module + self._suffixes.get(leaf, f"_{leaf}")

    def unpack(self, stored: Reader) -> PackedExperts:
        codes = stored.get("weight", (torch.float8_e4m3fn,), (None, None, None))
        if stored.has("weight_scale_inv"):
            stored.get("weight_scale_inv", _SCALE_DTYPES, (len(codes), None, None))
        return PackedExperts(tuple(map(self._unpack_one, stored.each())))


def with_experts(linear: Fp8Format) -> FormatOf:
    """Use the format for linear layers, and its like for tensors of all experts."""
    fused = Fp8ExpertsFormat(linear.block, linear.group_size, linear.activations)

    def format_of(module: str, names: Collection[str]) -> StorageFormat:
        return fused if any(f"{module}.{name}_scale_inv" in names for name in EXPERTS) else linear

    return format_of
