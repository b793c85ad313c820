"""The loop over decoder layers that all models share; it captures rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from vllm.forward_context import (
    HIDDEN_STATES,
    Addition,
    ForwardContext,
    get_forward_context,
)
from vllm.model_executor.layers.shared_tokens import all_tokens, own_tokens

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
    layer_id = first_layer
    for layer in layers:
        _pass_boundary(context, layer_id, hidden_states, residual)
        if layer_id == context.num_layers_to_run:
            return hidden_states, residual
        hidden_states, residual = layer(positions, hidden_states, residual)
        layer_id += 1
    if is_last_stage:
        _pass_boundary(context, layer_id, hidden_states, residual)
    return hidden_states, residual


def _pass_boundary(
    context: ForwardContext,
    boundary: int,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
) -> None:
    """Steer the stream in place, and hand it to the sink; shared tokens are gathered for that."""
    sink, steering = context.row_sink, context.steering
    additions = () if steering is None else steering.additions.get(boundary, ())
    is_put = sink is not None and boundary in sink.layer_ids
    share = hidden_states
    if context.shared_tokens:
        is_gathered = boundary in context.gathered_boundaries
        assert is_gathered or not is_put, "other ranks do not know that this stream is kept"
        if not additions and not is_gathered:
            return
        hidden_states = all_tokens(hidden_states)
        residual = None if residual is None else all_tokens(residual)
    if additions:
        steer(additions, hidden_states, residual)
        if context.shared_tokens:
            share.copy_(own_tokens(hidden_states))
    if sink is not None and is_put:
        sink.put(HIDDEN_STATES, boundary, hidden_states, residual)


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
