"""Rotary embeddings whose frequencies follow from the longest sequence of a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_FOLLOW_THE_LENGTH = ("dynamic", "longrope")


def check_positions(model: nn.Module, max_model_len: int) -> None:
    """ValueError: some requests would be so long that what is computed of a token depends on the
    tokens that come after it, and on the requests beside it."""
    for module in model.modules():
        for rope_type, limit in _limits(module):
            if max_model_len > limit:
                raise ValueError(
                    f"max_model_len={max_model_len} exceeds the {limit} positions up to which "
                    f"{rope_type} rope scaling does not depend on the length of the sequence; use "
                    f"max_model_len<={limit}"
                )


def _limits(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Kind of each scaling of that sort in a rotary embedding, and its positions."""
    types: Any = getattr(module, "rope_type", None)
    config: Any = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    if types is None or not parameters:
        return
    by_kind: Mapping[Any, str] = types if isinstance(types, Mapping) else {None: types}
    for kind, rope_type in by_kind.items():
        if rope_type in _FOLLOW_THE_LENGTH:
            own = parameters if kind is None else parameters[kind]
            original = own.get("original_max_position_embeddings")
            yield rope_type, int(original or config.max_position_embeddings)
