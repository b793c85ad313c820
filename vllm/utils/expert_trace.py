"""Which experts tokens were routed to, kept beside their hidden states.

A token's trace is int16 ``[layers, 3 * top_k]``: for each layer with a mixture of experts the ids
of the token's experts plus 1, in the router's order, then the bits of their float32 weights. So
memory that nobody wrote, zero or all ones, is no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm.exceptions import Failure, FailureKind
from vllm.utils import cdiv

_MOST_EXPERTS = 2**15 - 2


@dataclass(frozen=True)
class ExpertLayout:
    """The layers with a mixture of experts."""

    layer_ids: tuple[int, ...]
    """Decoder layers, counted from 0, ascending."""
    num_experts: int
    """Of the layer that has most."""
    top_k: int

    def __post_init__(self) -> None:
        if self.num_experts > _MOST_EXPERTS:
            raise ValueError(
                f"expert_trace=True: {self.num_experts} experts do not fit into a trace, which "
                f"holds {_MOST_EXPERTS}; leave it out"
            )

    @property
    def cell_shape(self) -> tuple[int, int]:
        """Of a token's trace."""
        return len(self.layer_ids), 3 * self.top_k

    def num_columns(self, width: int, dtype: torch.dtype) -> int:
        """Rows of ``width`` elements that hold the trace of a token, behind its hidden states."""
        layers, words = self.cell_shape
        return cdiv(layers * words * 2, width * dtype.itemsize)

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """int16 [blocks, rows, *cell_shape] behind hidden states [blocks, rows, layers, hidden].

        Each row is followed by :meth:`num_columns` more in the same memory.
        """
        words = rows.view(torch.int16)
        begin = words.storage_offset() + words.shape[2] * words.shape[3]
        layers, width = self.cell_shape
        shape = (*words.shape[:2], layers, width)
        return torch.as_strided(words, shape, (*words.stride()[:2], width, 1), begin)


class ExpertChoices(NamedTuple):
    """Traces as people read them."""

    ids: torch.Tensor
    """int16 [tokens, layers, top_k], the router's first choice first."""
    weights: torch.Tensor
    """float32, likewise: what the expert's output is multiplied with."""


def encode_choices(experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """experts: integers, weights: floats, both [tokens, top_k] -> int16 [tokens, 3 * top_k]."""
    bits = weights.float().contiguous().view(torch.int16)
    return torch.cat([(experts + 1).to(torch.int16), bits], dim=1)


def decode_choices(words: torch.Tensor) -> ExpertChoices:
    """int16 [tokens, layers, 3 * top_k] -> what :func:`encode_choices` was given."""
    top_k = words.shape[-1] // 3
    weights = words[..., top_k:].contiguous().view(torch.float32)
    return ExpertChoices(words[..., :top_k] - 1, weights)


def find_bad_choice(
    choices: ExpertChoices, layout: ExpertLayout, positions: Sequence[int]
) -> Failure | None:
    """Says which token's choices cannot be right: no expert's id, or no weight."""
    is_expert = (choices.ids >= 0) & (choices.ids < layout.num_experts)
    bad = (~(is_expert & choices.weights.isfinite())).any(-1).nonzero()
    if not len(bad):
        return None
    row, layer = bad[0].tolist()
    message = (
        f"the experts of token {positions[row]} in layer {layout.layer_ids[layer]} are not known: "
        f"ids {choices.ids[row, layer].tolist()}, weights {choices.weights[row, layer].tolist()}"
    )
    return Failure(FailureKind.STEP_FAILED, message)
