"""MXFP4: FP4 (E2M1) with a power of two for every 32 elements, ``value * 2 ** (scale - 127)``.

Source: OCP Microscaling Formats 1.0; GPT-OSS for its experts.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm.model_executor.layers.quantization.storage_format import Reader, StorageFormat
from vllm.ops.packed_linear import FP4_VALUES, PackedExperts, PackedWeight

_GROUP = 32
_SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


class Mxfp4Format(StorageFormat):
    """``weight_packed`` uint8 [m, n / 2]; ``weight_scale`` uint8 [m, n / 32]."""

    name = "MXFP4"
    required: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")

    def unpack(self, stored: Reader) -> PackedWeight:
        leaf = self.required[0]
        codes = stored.get(leaf, (torch.uint8,), (None, None))
        columns = 2 * codes.shape[1]
        stored.check_group_size(leaf, columns, _GROUP)
        stored.get("weight_scale", _SCALE_DTYPES, (codes.shape[0], columns // _GROUP))
        scales = stored.powers_of_two("weight_scale")
        return PackedWeight(codes, scales, columns, _GROUP, FP4_VALUES)


class Mxfp4ModuleFormat(Mxfp4Format):
    """Of Quark: ``weight`` uint8 [m, n / 2]; ``weight_scale``."""

    required: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")


class Mxfp4ExpertsFormat(StorageFormat):
    """Experts of GPT-OSS: ``NAME_blocks`` uint8 [experts, m, n / 32, 16], ``NAME_scales`` uint8
    [experts, m, n / 32].
    """

    name = "MXFP4"
    required: ClassVar[tuple[str, ...]] = ("blocks", "scales")

    def split(self, name: str) -> tuple[str, str] | None:
        module, _, leaf = name.rpartition("_")
        return (module, leaf) if leaf in self.required else None

    def tensor_name(self, module: str, leaf: str) -> str:
        return f"{module}_{leaf}"

    def weight_name(self, module: str) -> str:
        return module

    def unpack(self, stored: Reader) -> PackedExperts:
        blocks = stored.get("blocks", (torch.uint8,), (None, None, None, _GROUP // 2))
        stored.get("scales", _SCALE_DTYPES, blocks.shape[:3])
        scales = stored.powers_of_two("scales")
        columns = _GROUP * blocks.shape[2]
        return PackedExperts(
            tuple(
                PackedWeight(codes.flatten(1), scale, columns, _GROUP, FP4_VALUES)
                for codes, scale in zip(blocks, scales, strict=True)
            ),
            inputs_first=True,
        )
