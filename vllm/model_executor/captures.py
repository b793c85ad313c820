"""Captures: modules of a model hand over the values of a row's fields.

A capture prepares a loaded model, so that its modules put values into the row sink of a pass
(``RowSink.put``). The stream between layers needs no capture: the decoder loop has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from vllm.model_executor.layers.fused_moe import EXPERTS, number_routed_layers
from vllm.v1.rows.fields.layout import Field, FieldFacts

if TYPE_CHECKING:
    from vllm.config import ModelConfig

CAPTURES: Mapping[str, Callable[[nn.Module], Any]] = {EXPERTS: number_routed_layers}
"""Source of a field -> function that prepares a model for it and returns facts for the field."""


def make_fields(model: nn.Module, model_config: ModelConfig) -> tuple[Field, ...]:
    """Make the fields that an engine keeps of each token besides hidden states.

    Afterwards the model hands over their values. ValueError: it cannot.
    """
    found = []
    for field_class in model_config.row_field_classes:
        prepare = CAPTURES.get(field_class.source)
        facts = FieldFacts(
            model_config.get_total_num_hidden_layers(),
            model_config.get_row_size(),
            model_config.dtype,
            None if prepare is None else prepare(model),
        )
        found.append(field_class.make(facts))
    return tuple(found)
