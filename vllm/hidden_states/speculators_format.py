"""What speculators 0.9 trains from: ``hs_{i}.safetensors`` beside row i of its own dataset.

Its loader takes ``hidden_states`` [tokens, layers, hidden] with ``token_ids`` equal to the
row's ``input_ids``; the last slot is the verifier's final state, the others go to the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.hidden_states.layer_ids import resolve_layer_ids


def check_speculators(
    layer_ids: Sequence[int], num_hidden_layers: int, positions: str, dtype: str
) -> str | None:
    """What the training command has to be told, if anything.

    ValueError: speculators cannot train from such a dataset; says why.
    """
    if positions != "all":
        raise ValueError(
            f"format=speculators with positions={positions}: it trains on every token of a "
            "sample; use positions=all, or another format"
        )
    if dtype == "fp8":
        raise ValueError(
            "format=speculators with dtype=fp8: its loader knows no scales; use bfloat16, "
            "float16 or float32, or another format"
        )
    if len(layer_ids) < 2 or layer_ids[-1] != num_hidden_layers:
        raise ValueError(
            f"format=speculators with layers {list(layer_ids)}: it takes the last slot for the "
            f"model's final state; let the list end with {num_hidden_layers} ('last')"
        )
    inputs = list(layer_ids[:-1])
    if len(set(inputs)) != len(inputs):
        raise ValueError(
            f"format=speculators with layers {list(layer_ids)}: it needs different layers before "
            "the last slot"
        )
    try:
        expected = list(resolve_layer_ids("eagle3", num_hidden_layers))[:-1]
    except ValueError:
        expected = []
    if inputs == expected:
        return None
    return f"train with --target-layer-ids {' '.join(str(layer_id) for layer_id in inputs)}"
