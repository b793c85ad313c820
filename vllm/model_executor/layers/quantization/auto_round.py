"""The ``quantization_config`` of AutoRound, whose tensors are those of GPTQ or of AWQ."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from vllm.model_executor.layers.quantization.awq import AwqFormat
from vllm.model_executor.layers.quantization.gptq import GptqFormat
from vllm.model_executor.layers.quantization.storage_format import (
    FormatOf,
    StorageFormat,
    expression,
    section,
    setting,
    whole_number,
)

_USUAL = "auto_round:auto_gptq"
_ZERO_OFFSETS = {
    **dict.fromkeys((_USUAL, "auto_gptq", "auto_round:gptq", "auto_round:gptq:exllamav2"), 1),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), 0),
    **dict.fromkeys(("auto_round:exllamav2", "auto_round:triton"), 0),
}
"""Zero offsets of the packings that are GPTQ's: 1 if stored zeros are one too small."""
_AWQ = ("auto_round:auto_awq", "auto_awq")
_NOT_QUANTISED_BITS = 16


def read_auto_round(config: Mapping[str, Any]) -> FormatOf:
    """Read the config. ValueError: a packing, or a setting of a module, is not supported."""
    usual, extra = _format_of(config), section(config, "extra_config")
    others = [
        (name, expression(name, "extra_config"), _format_of({**config, **section(extra, name)}))
        for name in extra
    ]

    def format_of(module: str, names: Collection[str]) -> StorageFormat | None:
        named = [made for name, _, made in others if name == module]
        matched = [made for _, pattern, made in others if _finds(pattern, module)]
        return (named or matched or [usual])[0]

    return format_of


def _finds(pattern: re.Pattern[str], module: str) -> bool:
    """Return whether the entry is an expression that matches the module."""
    is_name = re.fullmatch(r"[\w.]+", pattern.pattern) is not None
    return not is_name and pattern.search(module) is not None


def _format_of(settings: Mapping[str, Any]) -> StorageFormat | None:
    """The format of these settings; None: floating point."""
    bits = settings.get("bits")
    if isinstance(bits, int) and bits >= _NOT_QUANTISED_BITS:
        return None
    setting(settings, "data_type", "int", ("int",))
    packing = "packing_format" if settings.get("packing_format") else "backend"
    found = setting(settings, packing, _USUAL, (*_ZERO_OFFSETS, *_AWQ))
    group_size = whole_number(settings, "group_size", 128)
    if found in _AWQ:
        setting(settings, "bits", None, (4,))
        return AwqFormat(group_size)
    bits, is_symmetric = (
        setting(settings, "bits", None, (2, 3, 4, 8)),
        setting(settings, "sym", False, (True, False)),
    )
    return GptqFormat(bits, group_size, _ZERO_OFFSETS[found], is_symmetric)
