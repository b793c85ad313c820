"""The recurrent states of a request as one run of bytes, in the terms of the checkpoint.

It holds the tensors that ``MambaSpec.read_state`` gives for each layer, dense, in the order of the
layers' names. What one machine stored, another can read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch

from vllm.v1.cache_kinds.base import KVCacheConfig

if TYPE_CHECKING:
    from vllm.v1.cache_kinds.recurrent import MambaSpec


class StateLayout:
    """Converts all states of a request to bytes and back."""

    def __init__(self, plan: KVCacheConfig) -> None:
        self._plan = plan
        places: dict[str, tuple[int, MambaSpec]] = {}  # by name: place of the block, spec
        for place, group_id in enumerate(plan.recurrent_group_ids):
            for name in plan.kv_cache_groups[group_id].layer_names:
                places[name] = place, cast("MambaSpec", plan.spec_of(name))
        self._layers = dict(sorted(places.items()))

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all states of a request."""
        return sum(self._sizes)

    @cached_property
    def _sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [
            math.prod(shape) * dtype.itemsize
            for _, spec in self._layers.values()
            for shape, dtype in spec.state_tensors
        ]

    def facts(self) -> list[tuple[str, str]]:
        """Names and tensors of the states, on which the bytes depend."""
        return [(name, str(spec.state_tensors)) for name, (_, spec) in self._layers.items()]

    def read(self, pool: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        """Return the states in these blocks, one per recurrent group, as int8."""
        parts = [
            state.view(-1).view(torch.int8)
            for name, (place, spec) in self._layers.items()
            for state in spec.read_state(self._views(pool, name, spec), blocks[place])
        ]
        return torch.cat(parts)

    def write(self, pool: torch.Tensor, blocks: Sequence[int], data: torch.Tensor) -> None:
        """Reverse :meth:`read`. ValueError: there are too few or too many bytes."""
        if len(data) != self.num_bytes:
            raise ValueError(f"{len(data)} bytes for states of {self.num_bytes}")
        parts = iter(torch.split(data, self._sizes))
        for name, (place, spec) in self._layers.items():
            states = [
                next(parts).clone().view(dtype).view(shape) for shape, dtype in spec.state_tensors
            ]
            spec.write_state(self._views(pool, name, spec), blocks[place], states)

    def _views(self, pool: torch.Tensor, name: str, spec: MambaSpec) -> tuple[torch.Tensor, ...]:
        return spec.layer_views(pool, self._plan.tensor_of_layer[name], name)
