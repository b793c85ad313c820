"""Results of plain transformers for some prompts: a model that is cut is compared with them.

A rank that has a part of a model cannot run plain transformers. So passes over the prompts of the
check run before the model is cut, and their results are kept until the check.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from vllm.forward_context import HIDDEN_STATES, RowSink
from vllm.utils.boundaries import LayerId

_LENGTHS = (21, 9)
"""Tokens of the prompts."""
_SEED = 5


def reference_prompts(vocab_size: int, longest: int) -> list[list[int]]:
    """Return the prompts of the check. longest: the most tokens of a request."""
    generator = np.random.default_rng(_SEED)
    return [generator.integers(vocab_size, size=min(n, longest)).tolist() for n in _LENGTHS]


class KeptRows(RowSink):
    """Keeps the rows of every boundary of every pass."""

    def __init__(self, num_layers: int) -> None:
        self.layer_ids = frozenset(range(num_layers + 1))
        self.rows: dict[LayerId, list[torch.Tensor]] = {i: [] for i in range(num_layers + 1)}

    def put(self, source: str, index: LayerId, *values: Any) -> None:
        hidden, residual = values
        stream = hidden if residual is None else hidden + residual
        self.rows[index].append(stream.float().clone())


class Reference(NamedTuple):
    """The results of a plain pass over one prompt."""

    rows: dict[LayerId, torch.Tensor]
    """[tokens, hidden] at the boundaries of this stage."""
    logits: torch.Tensor | None
    """[tokens, vocabulary]; None: another stage has the head."""
    incoming: torch.Tensor | None
    """[tokens, width], the stream that enters this stage; None: it is the first."""

    def put_into(self, sink: RowSink) -> None:
        """Hand over the rows."""
        for layer_id, rows in self.rows.items():
            sink.put(HIDDEN_STATES, layer_id, rows, None)
