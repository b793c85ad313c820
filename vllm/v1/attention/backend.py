"""What attention and recurrent layers read in a forward pass, one object a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm.ops.layout import SequenceLayout, StatePlan


@dataclass(frozen=True)
class AttentionMetadata:
    """Metadata of the layers of one attention group for one step.

    ``block_table``: int32 [requests, max_blocks]; ``slot_mapping``: int64 [tokens].
    """

    layout: SequenceLayout
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class RecurrentMetadata:
    """Metadata of the layers of one recurrent group for one step."""

    layout: SequenceLayout
    states: StatePlan
