"""Rotation of query and key heads by their position."""

from __future__ import annotations

import torch

from vllm.forward_context import current_rotary_positions
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.rotary_embedding.frequencies import RotaryFrequencies
from vllm.ops.rotary import rotary_embedding


class RotaryEmbedding(Layer):
    """Holds ``cos_sin_cache``, float32 [positions, rotary_dim]: cosines, then sines.

    long_frequencies: of sequences of more than ``longrope_limit`` tokens. Their table stands behind
    that of the positions below the limit, and the pass says which rows its tokens take.
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
        if self.has_long_table and (rows := current_rotary_positions()) is not None:
            positions = rows
        rotary_embedding(
            positions,
            self._by_head(query),
            self._by_head(key),
            self.cos_sin_cache,
            not self.is_neox_style,
        )
        return query, key

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.dim() == 3 else x.view(x.shape[0], -1, self.head_size)


def _table(frequencies: RotaryFrequencies, num_positions: int) -> torch.Tensor:
    """float32 [positions, rotary_dim]."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * frequencies.inverse.to(positions.device)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * frequencies.attention_factor
