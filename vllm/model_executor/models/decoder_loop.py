"""The loop over decoder layers that all models share; it captures rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from vllm.forward_context import HIDDEN_STATES, Addition, get_forward_context
from vllm.utils.boundaries import LayerId

Stream = tuple[torch.Tensor, torch.Tensor | None]
"""``(hidden, residual)``: the residual stream is their sum; residual None: it is ``hidden``."""

DecoderLayer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Stream]
"""``layer(positions, hidden, residual)``; may change both tensors in place."""


def run_decoder_layers(
    layers: Iterable[DecoderLayer],
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    first_layer: int = 0,
    is_last_stage: bool = True,
) -> Stream:
    """Run the layers in order; returns the stream after the last layer that ran.

    first_layer: number of the first of them, in a pipeline stage. The stream after the last one is
    a boundary of the next stage, unless this is the last.

    The stream that enters layer i, and the stream after the last layer, go to the context's
    row sink if it has requested that id. The sink copies at once, because the next layer
    overwrites the tensors. ``num_layers_to_run`` stops before the layer of that index.
    """
    context = get_forward_context()
    additions = None if context.steering is None else context.steering.additions
    sink = context.row_sink
    requested = sink.layer_ids if sink is not None else frozenset[LayerId]()
    layer_id = first_layer
    for layer in layers:
        if additions is not None:
            steer(additions.get(layer_id, ()), hidden_states, residual)
        if sink is not None and layer_id in requested:
            sink.put(HIDDEN_STATES, layer_id, hidden_states, residual)
        if layer_id == context.num_layers_to_run:
            return hidden_states, residual
        hidden_states, residual = layer(positions, hidden_states, residual)
        layer_id += 1
    if not is_last_stage:
        return hidden_states, residual
    if additions is not None:
        steer(additions.get(layer_id, ()), hidden_states, residual)
    if sink is not None and layer_id in requested:
        sink.put(HIDDEN_STATES, layer_id, hidden_states, residual)
    return hidden_states, residual


def steer(
    additions: Iterable[Addition], hidden_states: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """Add vectors to the stream ``hidden_states (+ residual)``, [tokens, hidden], in place.

    Other tokens keep their bits. Sums are computed in float32.
    """
    for tokens, vector, norm_match in additions:
        branch = hidden_states[tokens].float()
        if norm_match:
            stream = branch if residual is None else branch + residual[tokens].float()
            vector = stream.norm(dim=-1, keepdim=True) * vector
        hidden_states[tokens] = (branch + vector).to(hidden_states.dtype)
