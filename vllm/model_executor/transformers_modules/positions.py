"""Handles rotary embeddings whose frequencies depend on the longest sequence of a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vllm.forward_context import current_rotary_positions

_FOLLOW_THE_LENGTH = ("dynamic", "longrope")


class _Local(threading.local):
    is_long: torch.Tensor | None = None


_local = _Local()


def follow_lengths(model: nn.Module, max_model_len: int, longrope_limit: int | None) -> None:
    """Make rotary embeddings by longrope follow the length of each token's own sequence.

    ValueError: requests may be so long that with "dynamic" scaling a token's values depend on how
    many tokens come after it.
    """
    for module in model.modules():
        kinds = dict(_kinds(module))
        if "dynamic" in kinds and max_model_len > (limit := kinds["dynamic"]):
            raise ValueError(
                f"max_model_len={max_model_len} exceeds the {limit} positions up to which "
                f"dynamic rope scaling does not depend on the length of the sequence; use "
                f"max_model_len<={limit}"
            )
        if "longrope" in kinds and longrope_limit is not None and max_model_len > longrope_limit:
            module.forward = _ByLength(module.forward, longrope_limit)


def _kinds(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the kind of each such scaling in a rotary embedding, and its positions."""
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


def are_long(positions: torch.Tensor) -> torch.Tensor | None:
    """bool [tokens]: True if a token's sequence is long for longrope; None: the model has no
    longrope."""
    rotary = current_rotary_positions()
    return None if rotary is None else rotary != positions


@contextmanager
def rotated_as_long(is_long: torch.Tensor | None) -> Iterator[None]:
    """Set for the block whether tokens belong to long sequences: one by one, or all alike."""
    before, _local.is_long = _local.is_long, is_long
    try:
        yield
    finally:
        _local.is_long = before


class _ByLength:
    """Replaces the ``forward`` of a rotary embedding by longrope, which looks at the last position
    of a pass: it runs once for short sequences and once for long ones."""

    def __init__(self, forward: Callable[..., Any], limit: int) -> None:
        self._forward, self._limit = forward, limit

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """position_ids: [1, tokens], or that for each axis -> tensors [1, tokens, n]."""
        is_long = _local.is_long
        if is_long is None:
            return self._forward(x, position_ids, *args, **kwargs)
        beyond = torch.full_like(position_ids[..., :1], self._limit)
        short = self._forward(x, position_ids.clamp(max=self._limit - 1), *args, **kwargs)
        long = self._forward(x, torch.cat((position_ids, beyond), dim=-1), *args, **kwargs)
        if isinstance(short, tuple):
            return tuple(_chosen(is_long, *both) for both in zip(short, long, strict=True))
        return _chosen(is_long, short, long)


def _chosen(is_long: torch.Tensor, short: torch.Tensor, long: torch.Tensor) -> torch.Tensor:
    return torch.where(is_long[..., None], long[:, :-1], short)
