"""The recurrent states of a request as one run of bytes, in the terms of the checkpoint.

For each layer, in the order of their names, the tensors that ``MambaSpec.read_state`` gives, dense:
what one machine stored another reads.
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
    """All states of a request, as bytes and back."""

    def __init__(self, plan: KVCacheConfig) -> None:
        self._plan = plan
        places: dict[str, tuple[int, MambaSpec]] = {}  # place of the block, spec; by name
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
        """What the bytes depend on."""
        return [(name, str(spec.state_tensors)) for name, (_, spec) in self._layers.items()]

    def read(self, pool: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        """int8, of the states in these blocks, one a recurrent group."""
        parts = [
            state.view(-1).view(torch.int8)
            for name, (place, spec) in self._layers.items()
            for state in spec.read_state(self._views(pool, name, spec), blocks[place])
        ]
        return torch.cat(parts)

    def write(self, pool: torch.Tensor, blocks: Sequence[int], data: torch.Tensor) -> None:
        """The reverse; ValueError: not as many bytes as these states take."""
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
