"""Rotation of query and key heads by their position."""

from __future__ import annotations

import torch
from torch import nn

from vllm.forward_context import current_rotary_positions
from vllm.model_executor.layers.layer import Layer, is_watched
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.frequencies import RotaryFrequencies
from vllm.ops.rotary import norm_and_rotate, rotary_embedding


class RotaryEmbedding(Layer):
    """Holds ``cos_sin_cache``, float32 [positions, rotary_dim]: cosines, then sines.

    long_frequencies: for sequences of more than ``longrope_limit`` tokens. Their table follows the
    table of the positions below the limit, and the forward context has the rows of the tokens.
    """

    cos_sin_cache: torch.Tensor

    def __init__(
        self,
        head_size: int,
        num_positions: int,
        frequencies: RotaryFrequencies,
        is_neox_style: bool = True,
        *,
        long_frequencies: RotaryFrequencies | None = None,
        longrope_limit: int = 0,
    ) -> None:
        super().__init__()
        self.head_size = head_size
        self.rotary_dim = 2 * frequencies.inverse.numel()
        self.is_neox_style = is_neox_style
        self.has_long_table = long_frequencies is not None
        if long_frequencies is None:
            table = _table(frequencies, num_positions)
        else:
            short = _table(frequencies, longrope_limit)
            table = torch.cat((short, _table(long_frequencies, num_positions)))
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate in place, and return, query and key.

        positions: int64 [tokens]; query, key: [tokens, heads * head_size] or
        [tokens, heads, head_size], strided.
        """
        rotary_embedding(
            self._rows(positions),
            self._by_head(query),
            self._by_head(key),
            self.cos_sin_cache,
            not self.is_neox_style,
        )
        return query, key

    def after_norms(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        query_norm: nn.Module,
        key_norm: nn.Module,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normed and rotated query and key [tokens, heads, head_size].

        One operation does it if the device overrides it, the norms are RMS norms of each head, and
        no hook reads the values in between.
        """
        if not norm_and_rotate.is_overridden(query.device):
            return self(positions, query_norm(query), key_norm(key))  # type: ignore[no-any-return]
        of_query, of_key = _norm_of_heads(query_norm, query), _norm_of_heads(key_norm, key)
        if of_query is None or of_key is None or of_query[1:] != of_key[1:] or is_watched(self):
            return self(positions, query_norm(query), key_norm(key))  # type: ignore[no-any-return]
        weight, epsilon, offset = of_query
        outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key)]
        norm_and_rotate(
            self._rows(positions),
            query,
            key,
            weight,
            of_key[0],
            epsilon,
            offset,
            self.cos_sin_cache,
            not self.is_neox_style,
            outs[0],
            outs[1],
        )
        return outs[0], outs[1]

    def _rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the tokens' rows of the table."""
        if self.has_long_table and (rows := current_rotary_positions()) is not None:
            return rows
        return positions

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.dim() == 3 else x.view(x.shape[0], -1, self.head_size)


def _norm_of_heads(norm: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, float, float] | None:
    """Return (weight, epsilon, offset) for the operation over the last dimension of ``x``; None:
    the norm computes something else, or has hooks."""
    if type(norm).forward is not RMSNorm.forward or is_watched(norm):
        return None
    assert isinstance(norm, RMSNorm)
    if norm.weight is None or norm.weight.dtype is not x.dtype:
        return None
    return norm.weight, norm.variance_epsilon, norm.weight_offset


def _table(frequencies: RotaryFrequencies, num_positions: int) -> torch.Tensor:
    """-> float32 [positions, rotary_dim]."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies.inverse.to(positions.device)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * frequencies.attention_factor
