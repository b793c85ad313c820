"""Names of the boundaries at which a model's stream is kept.

An integer i is the residual stream after i decoder layers. "norm" is the stream after the last
layer and the model's final norm, as the LM head reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

NORM = "norm"
LayerId: TypeAlias = int | str


def in_order(layer_ids: Iterable[LayerId]) -> list[LayerId]:
    """Return the ids in the order in which a pass reaches them: the norm is the last."""
    return sorted(layer_ids, key=lambda one: (one == NORM, one))


def num_layers_to_run(layer_ids: Iterable[LayerId], num_hidden_layers: int) -> int:
    """Return how far a pass has to run: a number of decoder layers, one more for the norm."""
    deepest = in_order((0, *layer_ids))[-1]
    return num_hidden_layers + 1 if isinstance(deepest, str) else deepest
