"""Rotary position embeddings: default, linear, dynamic, yarn, longrope, llama3, proportional."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.frequencies import (
    SUPPORTED_ROPE_TYPES,
    rope_type_of,
    rotary_frequencies,
)
from vllm.model_executor.layers.rotary_embedding.parameters import read_rope_parameters

# The layers of a model share one table, although each calls get_rope; it lives as long as they do.
_shared: WeakValueDictionary[str, RotaryEmbedding] = WeakValueDictionary()


def get_rope(
    head_size: int,
    max_position: int,
    is_neox_style: bool = True,
    rope_parameters: Mapping[str, Any] | None = None,
    *,
    num_positions: int | None = None,
) -> RotaryEmbedding:
    """Make the rotary embedding of a model's heads.

    max_position: the model's ``max_position_embeddings``, to which scalings refer.
    num_positions: positions of the table (``max_model_len``); None: as many as scaling covers.

    Limit: "dynamic" scaling is the identity up to ``max_position``. Beyond it transformers
    chooses the frequencies by the length of the whole sequence, which is not a function of a
    token's position (cached keys would have to be rotated again), so more positions are refused.
    "longrope" has factors for sequences of up to ``original_max_position_embeddings`` tokens, and
    others for longer ones, in a second table (:class:`RotaryEmbedding`).
    """
    parameters = dict(rope_parameters or {})
    rope_type = rope_type_of(parameters)
    if num_positions is None:
        num_positions = _extended_positions(rope_type, parameters, max_position)
    is_dynamic = rope_type == "dynamic" and not parameters.get("alpha")
    if is_dynamic and num_positions > max_position:
        raise ValueError(
            f"max_model_len={num_positions} exceeds the {max_position} positions up to which "
            f"dynamic rope scaling is exact; use max_model_len<={max_position}, or a rope_type "
            f"that does not depend on the length of the sequence (linear, yarn)"
        )
    shape = (head_size, max_position, num_positions, is_neox_style)
    key = json.dumps([*shape, str(torch.get_default_device()), parameters], sort_keys=True)
    rope = _shared.get(key)
    if rope is None:
        sizes = (head_size, max_position)
        limit: int = parameters.get("original_max_position_embeddings") or max_position
        is_long = rope_type == "longrope" and num_positions > limit
        rope = RotaryEmbedding(
            head_size,
            num_positions,
            rotary_frequencies(parameters, *sizes),
            is_neox_style,
            long_frequencies=rotary_frequencies(parameters, *sizes, is_long=True)
            if is_long
            else None,
            longrope_limit=limit,
        )
        _shared[key] = rope
    return rope


def _extended_positions(rope_type: str, parameters: Mapping[str, Any], max_position: int) -> int:
    if rope_type != "yarn":
        return max_position
    original: int = parameters.get("original_max_position_embeddings", max_position)
    return max(max_position, int(original * (parameters.get("factor") or 1.0)))


__all__ = ["SUPPORTED_ROPE_TYPES", "RotaryEmbedding", "get_rope", "read_rope_parameters"]
