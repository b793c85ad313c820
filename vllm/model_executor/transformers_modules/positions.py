"""Rotary embeddings whose frequencies follow from the longest sequence of a pass."""

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
    """Rotary embeddings by longrope go by the length of each token's own sequence from now on.

    ValueError: some requests would be so long that "dynamic" scaling makes what is computed of a
    token depend on how many come after it.
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


def are_long(positions: torch.Tensor) -> torch.Tensor | None:
    """bool [tokens] of the pass at these positions: whose sequence is a long one to longrope; None:
    the model has no longrope."""
    rotary = current_rotary_positions()
    return None if rotary is None else rotary != positions


@contextmanager
def rotated_as_long(is_long: torch.Tensor | None) -> Iterator[None]:
    """Inside the block a module's tokens, or all of them, are those of long sequences, or not."""
    before, _local.is_long = _local.is_long, is_long
    try:
        yield
    finally:
        _local.is_long = before


class _ByLength:
    """In the place of the ``forward`` of a rotary embedding by longrope, which looks at the last
    position of a pass: once for short sequences, once for long ones."""

    def __init__(self, forward: Callable[..., Any], limit: int) -> None:
        self._forward, self._limit = forward, limit

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """position_ids: [1, tokens], or one such for each axis -> tensors [1, tokens, n]."""
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
