"""MXFP4: FP4 (E2M1) with a power of two for every 32 elements, ``value * 2 ** (scale - 127)``.

Source: OCP Microscaling Formats 1.0; GPT-OSS for its experts.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from vllm.model_executor.layers.quantization.storage_format import Reader, StorageFormat
from vllm.ops.packed_linear import FP4_VALUES, PackedExperts, PackedWeight

_GROUP = 32
_NAN = 255


class Mxfp4Format(StorageFormat):
    """``weight_packed`` uint8 [m, n / 2]; ``weight_scale`` uint8 [m, n / 32]."""

    name = "MXFP4"
    required: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")

    def unpack(self, stored: Reader) -> PackedWeight:
        codes = stored.get("weight_packed", (torch.uint8,), (None, None))
        columns = 2 * codes.shape[1]
        stored.check_group_size("weight_packed", columns, _GROUP)
        stored.get("weight_scale", (torch.uint8,), (codes.shape[0], columns // _GROUP))
        scales = _powers_of_two(stored, "weight_scale")
        return PackedWeight(codes, scales, columns, _GROUP, FP4_VALUES)


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
        stored.get("scales", (torch.uint8,), blocks.shape[:3])
        scales = _powers_of_two(stored, "scales")
        columns = _GROUP * blocks.shape[2]
        return PackedExperts(
            tuple(
                PackedWeight(codes.flatten(1), scale, columns, _GROUP, FP4_VALUES)
                for codes, scale in zip(blocks, scales, strict=True)
            ),
            inputs_first=True,
        )


def _powers_of_two(stored: Reader, leaf: str) -> torch.Tensor:
    exponents = stored.get(leaf, (torch.uint8,))
    if (exponents == _NAN).any():
        raise stored.fail(leaf, f"holds {_NAN}, which is NaN, among its scales")
    return exponents.view(torch.float8_e8m0fnu)
