"""Recurrent states in the terms of the checkpoint, whatever a kernel makes of them.

For each layer, in the order of their names, the tensors of its spec without what is pending, dense:

    gated delta net   inputs of the convolution [width - 1, channels] in the model's dtype,
                      state [heads, dk, dv] in float32
    others            as docs/design.md lists them

A kernel may keep a state as rounded halves and the rest of their bits (``csrc/cpu/delta_state.h``),
with tokens that the state does not know yet. States are copied where nothing is pending: then no
bit is lost on the way out and back in, and what one machine stored another reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm.v1.cache_kinds.base import KVCacheConfig
from vllm.v1.cache_kinds.recurrent import MambaSpec

_LOW, _HIGH, _HALF = 0xFFFF, -0x10000, 0x8000


def join_halves(stored: torch.Tensor) -> torch.Tensor:
    """Float32 [..., dk, dv] of a state that lies in halves: all of its bits."""
    words = stored.contiguous().view(torch.int32)
    pairs = words.shape[-2] // 2
    rounded, low = words[..., :pairs, :], words[..., pairs : 2 * pairs, :]
    plain = words.clone()
    plain[..., 0 : 2 * pairs : 2, :] = (rounded << 16) + ((low << 16) >> 16)
    plain[..., 1 : 2 * pairs : 2, :] = (rounded & _HIGH) + (low >> 16)
    return plain.view(torch.float32)


def part_halves(plain: torch.Tensor) -> torch.Tensor:
    """The reverse of :func:`join_halves`."""
    words = plain.contiguous().view(torch.int32)
    pairs = words.shape[-2] // 2
    upper, lower = words[..., 0 : 2 * pairs : 2, :], words[..., 1 : 2 * pairs : 2, :]
    stored = words.clone()
    stored[..., :pairs, :] = (((upper + _HALF) >> 16) & _LOW) | ((lower + _HALF) & _HIGH)
    stored[..., pairs : 2 * pairs, :] = (upper & _LOW) | (lower << 16)
    return stored.view(torch.float32)


class StateLayout:
    """All states of a request, as one run of bytes and back."""

    def __init__(self, plan: KVCacheConfig) -> None:
        self._plan = plan
        self._layers: dict[str, tuple[int, MambaSpec]] = {}  # place of the block, spec; by name
        for place, group_id in enumerate(plan.recurrent_group_ids):
            for name in plan.kv_cache_groups[group_id].layer_names:
                spec = plan.spec_of(name)
                assert isinstance(spec, MambaSpec)
                self._layers[name] = place, spec
        self._layers = dict(sorted(self._layers.items()))

    def facts(self) -> list[tuple[str, str]]:
        """What the bytes depend on."""
        return [
            (name, f"{spec.shapes[: spec.num_states]} {spec.dtypes[: spec.num_states]}")
            for name, (_, spec) in self._layers.items()
        ]

    def read(self, pool: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
        """int8, of the states in these blocks, one a recurrent group."""
        parts = []
        for name, (place, spec) in self._layers.items():
            for index, view in enumerate(self._views(pool, name, spec)):
                state = view[blocks[place]].cpu()
                if spec.in_halves(index):
                    state = join_halves(state)
                parts.append(state.contiguous().view(-1).view(torch.int8))
        return torch.cat(parts)

    def write(self, pool: torch.Tensor, blocks: Sequence[int], data: torch.Tensor) -> None:
        """The reverse; ValueError: not as many bytes as these states take."""
        sizes = [
            view[0].numel() * view.element_size()
            for name, (_, spec) in self._layers.items()
            for view in self._views(pool, name, spec)
        ]
        if len(data) != sum(sizes):
            raise ValueError(f"{len(data)} bytes for states of {sum(sizes)}")
        parts = iter(torch.split(data, sizes))
        for name, (place, spec) in self._layers.items():
            for index, view in enumerate(self._views(pool, name, spec)):
                state = next(parts).clone().view(view.dtype).view(view.shape[1:])
                if spec.in_halves(index):
                    state = part_halves(state)
                view[blocks[place]].copy_(state)

    def _views(self, pool: torch.Tensor, name: str, spec: MambaSpec) -> tuple[torch.Tensor, ...]:
        views = spec.layer_views(pool, self._plan.tensor_of_layer[name], name)
        return views[: spec.num_states]
