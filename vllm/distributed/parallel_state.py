"""Groups of parallel ranks: this process's rank in each group, and collective operations.

One process serves an engine today, so every group has one rank, 0. Layers slice their weights by
the ranks given here, so they need no change when a group has several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class GroupCoordinator:
    """The ranks that share one kind of parallelism, seen from this process."""

    rank_in_group: int
    world_size: int

    @property
    def rank(self) -> int:
        """The rank among all ranks; there is only one, 0."""
        return 0

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``tensor`` over the ranks; a group of one returns it unchanged."""
        assert self.world_size == 1
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return rank ``src``'s tensor; a group of one returns its own."""
        assert self.world_size == 1 and src == 0
        return tensor

    def broadcast_object(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s object; a group of one returns its own."""
        assert self.world_size == 1 and src == 0
        return value

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        assert self.world_size == 1

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' tensors, concatenated along ``dim``; a group of one returns its own."""
        assert self.world_size == 1
        return tensor


_ALONE = GroupCoordinator(rank_in_group=0, world_size=1)
_TP = _ALONE


def get_tp_group() -> GroupCoordinator:
    """Return the group of the ranks that each hold a slice of every layer."""
    return _TP


def get_world_group() -> GroupCoordinator:
    """Return the group of all ranks of an engine."""
    return _ALONE


get_pp_group = get_world_group
"""Return the group of the ranks that each hold some of the layers."""
get_dp_group = get_world_group
"""Return the group of the ranks that each serve other requests."""
get_dcp_group = get_world_group
"""Return the group of the ranks that each hold a part of the tokens while decoding."""
get_pcp_group = get_world_group
"""Return the group of the ranks that each hold a part of the tokens of a prompt."""


def get_tensor_model_parallel_rank() -> int:
    return get_tp_group().rank_in_group


def get_tensor_model_parallel_world_size() -> int:
    return get_tp_group().world_size


def tensor_model_parallel_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``tensor`` over the tensor-parallel ranks."""
    return get_tp_group().all_reduce(tensor)


def tensor_model_parallel_all_gather(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return the slices of the tensor-parallel ranks, concatenated along ``dim``."""
    return get_tp_group().all_gather(tensor, dim)
