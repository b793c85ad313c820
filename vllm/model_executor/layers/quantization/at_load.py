"""Quantises linear layers of a float checkpoint while it loads (``quantization="int4"``).

Every group of a row (FP8: every block) gets the scale that brings its largest magnitude to the
largest code. Values are divided by it in float32 and rounded to the nearest code, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.quantization.storage_format import join_halves
from vllm.ops.packed_linear import INT4_VALUES, PackedWeight
from vllm.utils.checked import is_unset

GROUP = 128
"""Columns of a group; for FP8, rows and columns of a block."""

_TABLE_ROWS = 32 * GROUP

Quantise = Callable[[torch.Tensor], PackedWeight]


def quantise_of_current_config() -> Quantise | None:
    """The method in the config of the model that is being built; None: it quantises nothing."""
    config = get_current_vllm_config_or_none()
    if config is None or is_unset(config.model_config):
        return None
    method = config.model_config.quantise_at_load
    return None if method is None else METHODS[method]


def to_int4(weight: torch.Tensor) -> PackedWeight:
    """Quantise to codes -7 to 7, ``weight / scale``; scales have the weight's dtype."""
    codes, scales = _integers(weight, 7)
    packed = join_halves((codes + 8).to(torch.uint8))
    return PackedWeight(packed, scales, weight.shape[1], GROUP, INT4_VALUES)


def to_int8(weight: torch.Tensor) -> PackedWeight:
    """Quantise to codes -127 to 127, likewise."""
    codes, scales = _integers(weight, 127)
    return PackedWeight(codes.to(torch.int8), scales, weight.shape[1], GROUP)


def to_fp8(weight: torch.Tensor) -> PackedWeight:
    """Quantise to E4M3 in blocks of 128 x 128; scales are float32."""
    rows, columns = weight.shape
    largest = torch.finfo(torch.float8_e4m3fn).max
    padded = functional.pad(weight.float(), (0, -columns % GROUP, 0, -rows % GROUP))
    blocks = padded.view(padded.shape[0] // GROUP, GROUP, -1, GROUP)
    scales = _no_zeros(blocks.abs().amax((1, 3)) / largest).repeat_interleave(GROUP, 0)[:rows]
    codes = weight.float() / scales.repeat_interleave(GROUP, 1)[:, :columns]
    codes = codes.clamp(-largest, largest).to(torch.float8_e4m3fn)
    return PackedWeight(codes, scales, columns, GROUP)


def quantise_table(table: torch.Tensor, method: str) -> PackedWeight:
    """Quantise an embedding or LM head some rows at a time: whole float copies would be large."""
    first, *others = [METHODS[method](rows) for rows in torch.split(table, _TABLE_ROWS)]
    return first.above(*others)


METHODS: Mapping[str, Quantise] = {"fp8": to_fp8, "int8": to_int8, "int4": to_int4}


def _integers(weight: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes in float32 [m, n] and scales [m, groups]."""
    columns = weight.shape[1]
    padded = functional.pad(weight.float(), (0, -columns % GROUP))
    groups = padded.view(len(weight), padded.shape[1] // GROUP, GROUP)
    scales = _no_zeros((groups.abs().amax(2) / largest).to(weight.dtype))
    by_element = scales.float().repeat_interleave(GROUP, 1)[:, :columns]
    return (weight.float() / by_element).round().clamp(-largest, largest), scales


def _no_zeros(scales: torch.Tensor) -> torch.Tensor:
    """Set scales to 1 if all their values are 0."""
    return torch.where(scales == 0, 1.0, scales).to(scales.dtype)
