"""The experts to which each token was routed, and their weights (``expert_trace``).

A cell is int16 ``[layers with experts, 3 * top_k]``: for each of these layers the ids of the
token's experts plus 1, in the router's order, then the bits of their float32 weights. So memory
that was never written, all zero or all ones, does not decode to experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from vllm.exceptions import Failure, FailureKind
from vllm.utils.boundaries import LayerId
from vllm.v1.rows.fields.layout import Cells, Field, FieldFacts, TensorForm

_MOST_EXPERTS = 2**15 - 2


@dataclass(frozen=True)
class Experts(Field):
    """The routers' choices in every layer with a mixture of experts."""

    name: ClassVar[str] = "experts"
    source: ClassVar[str] = "experts"
    tensor_names: ClassVar[tuple[str, ...]] = ("expert_ids", "expert_weights")
    constant_names: ClassVar[tuple[str, ...]] = ("expert_layers",)

    layer_ids: tuple[int, ...]
    """Decoder layers, counted from 0, ascending."""
    num_experts: int
    """Number of experts of the layer that has most."""
    top_k: int

    def __post_init__(self) -> None:
        if self.num_experts > _MOST_EXPERTS:
            raise ValueError(
                f"expert_trace=True: {self.num_experts} experts do not fit into a trace, which "
                f"holds {_MOST_EXPERTS}; leave it out"
            )

    @classmethod
    def make(cls, facts: FieldFacts) -> Self:
        found: Self = facts.captured
        return found

    @classmethod
    def deepest_layer(cls, num_hidden_layers: int) -> int:
        return num_hidden_layers

    @property
    def cells(self) -> Cells:
        return Cells(torch.int16, len(self.layer_ids), 3 * self.top_k)

    def encode(self, *values: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode experts, integers, and their weights, floats, both [tokens, top_k]."""
        experts, weights = values
        bits = weights.float().contiguous().view(torch.int16)
        return torch.cat([(experts + 1).to(torch.int16), bits], dim=1), None

    @property
    def forms(self) -> Mapping[str, TensorForm]:
        shape = (len(self.layer_ids), self.top_k)
        return {
            "expert_ids": TensorForm(torch.int16, shape),
            "expert_weights": TensorForm(torch.float32, shape),
        }

    def decode(self, cells: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return ``expert_ids``, the router's first choice first, and ``expert_weights``."""
        bits = cells[..., self.top_k :].clone(memory_format=torch.contiguous_format)
        return {
            "expert_ids": cells[..., : self.top_k] - 1,
            "expert_weights": bits.view(torch.float32),
        }

    def find_fault(
        self, tensors: Mapping[str, torch.Tensor], positions: Sequence[int]
    ) -> Failure | None:
        ids, weights = (tensors[name] for name in self.tensor_names)
        is_expert = (ids >= 0) & (ids < self.num_experts)
        bad = (~(is_expert & weights.isfinite())).any(-1).nonzero()
        if not len(bad):
            return None
        row, layer = bad[0].tolist()
        message = (
            f"the experts of token {positions[row]} in layer {self.layer_ids[layer]} are not known:"
            f" ids {ids[row, layer].tolist()}, weights {weights[row, layer].tolist()}"
        )
        return Failure(FailureKind.STEP_FAILED, message)

    @property
    def constants(self) -> Mapping[str, Sequence[int]]:
        return {"expert_layers": self.layer_ids}

    def not_put(self, indexes: Sequence[LayerId], num_told: int, num_tokens: int) -> str:
        return f"layers with experts reported their choices for {num_told} of {num_tokens} tokens"
