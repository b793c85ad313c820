"""Captures: how modules of a model hand over what fields of a row are made of.

A capture prepares a model once it is loaded, so that its modules put values into the row sink of a
pass (``RowSink.put``). The stream at the boundaries of layers needs none: the decoder loop has it.
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
"""Source of a field -> what prepares a model for it, and says what the field has to know."""


def make_fields(model: nn.Module, model_config: ModelConfig) -> tuple[Field, ...]:
    """What an engine keeps of each token besides hidden states.

    From here on the model hands it over. ValueError: it cannot.
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
