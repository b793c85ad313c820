"""Groups of parallel ranks: this process's rank in each group, and collective operations.

Layers slice their weights by the ranks given here when they are made, and call the collective
operations in every pass. One process may run several engines, so the groups are those of the engine
that the current thread works for (:func:`use_groups`); without one, every group has one rank.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch

from vllm.distributed.communicators import Communicator, GroupClosedError, PartOfGroup
from vllm.distributed.pipeline_links import NO_LINKS, PipelineLinks
from vllm.utils import pickling

T = TypeVar("T")


@dataclass(frozen=True)
class GroupCoordinator:
    """The ranks that share one kind of parallelism, seen from this process."""

    rank_in_group: int
    world_size: int
    communicator: Communicator | None = None
    """None: the group has one rank, or this process does not compute."""
    decode_context_parallel_size: int = 1
    """Number of tensor-parallel ranks, one after another, over which cached tokens are spread."""
    prefill_context_parallel_size: int = 1
    """Number of tensor-parallel groups, one after another, that share the tokens of a step."""

    @property
    def rank(self) -> int:
        """The same as :attr:`rank_in_group`; of the world's group the rank among all ranks."""
        return self.rank_in_group

    def part(self, ranks: Sequence[int]) -> GroupCoordinator:
        """Return the group of some of these ranks, among them this one.

        Its collective operations are calls of all ranks: one part beside the other.
        """
        if len(ranks) == 1:
            return ALONE
        if len(ranks) == self.world_size:
            return self
        communicator = self.communicator
        if communicator is not None:
            communicator = PartOfGroup(communicator, ranks)
        return GroupCoordinator(ranks.index(self.rank_in_group), len(ranks), communicator)

    @cached_property
    def parts(self) -> PartsOfStage:
        """The groups within this one, if it has all ranks of a stage."""
        rank, size = self.rank_in_group, self.world_size // self.prefill_context_parallel_size
        first_of_groups = range(0, self.world_size, size)
        number, decode_size = rank % size, self.decode_context_parallel_size
        first = number // decode_size * decode_size
        decode = range(first, first + decode_size)
        return PartsOfStage(
            self.part(range(rank - number, rank - number + size)),
            self.part([first + number for first in first_of_groups]),
            self.part([rank - number + one for one in decode]),
            self.part([first + one for first in first_of_groups for one in decode]),
        )

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``tensor`` over the ranks; a group of one returns it unchanged.

        Values are added in float32 in the order of the ranks, so that all ranks get the same bits,
        and each element's sum depends on nothing else.
        """
        if self.world_size == 1:
            return tensor
        tensor = tensor.contiguous()
        result = torch.empty_like(tensor)
        flat = result.view(-1)
        for place, parts in self._open.exchange(tensor):
            flat[place] = _sum_in_order(parts)
        return result

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Return rank ``src``'s tensor; all ranks give one of the same shape and dtype."""
        if self.world_size == 1:
            return tensor
        tensor = tensor.contiguous()
        result = torch.empty_like(tensor)
        flat = result.view(-1)
        for place, parts in self._open.exchange(tensor):
            flat[place] = parts[src]
        return result

    def broadcast_object(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s object, which has to be picklable."""
        if self.world_size == 1:
            return value
        data = torch.frombuffer(bytearray(pickling.dumps(value)), dtype=torch.uint8)
        length = int(self.broadcast(torch.tensor([len(data)]), src))
        if self.rank_in_group != src:
            data = torch.zeros(length, dtype=torch.uint8)
        received: Any = pickle.loads(self.broadcast(data, src).numpy().tobytes())
        return value if self.rank_in_group == src else received

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        if self.world_size > 1:
            self.broadcast(torch.zeros(1))

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' tensors, of one shape, concatenated along ``dim``."""
        if self.world_size == 1:
            return tensor
        tensor = tensor.contiguous()
        whole = tensor.new_empty(self.world_size, *tensor.shape)
        flat = whole.view(self.world_size, -1)
        for place, parts in self._open.exchange(tensor):
            for rank, part in enumerate(parts):
                flat[rank, place] = part
        return whole.flatten(0, 1) if dim == 0 else torch.cat(list(whole), dim)

    def share_of_rows(self, num_rows: int) -> int:
        """Return how many of so many rows a rank has at most if the ranks share them in order."""
        return -(-num_rows // self.world_size)

    def own_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of rows that all ranks have; rows behind the last one are zero.

        tensor: [rows, ...] -> [share_of_rows, ...]
        """
        share = self.share_of_rows(len(tensor))
        own = tensor[self.rank_in_group * share :][:share]
        if len(own) == share:
            return own
        return torch.cat([own, own.new_zeros((share - len(own), *own.shape[1:]))])

    def reduce_scatter_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the rows of ``tensor``'s sum, with the bits of
        :meth:`all_reduce`; rows behind the last one are zero.

        tensor: [rows, ...] -> [share_of_rows, ...]
        """
        if self.world_size == 1:
            return tensor
        tensor = tensor.contiguous()
        result = tensor.new_zeros((self.share_of_rows(len(tensor)), *tensor.shape[1:]))
        flat = result.view(-1)
        start = self.rank_in_group * len(flat)
        for place, parts in self._open.exchange(tensor):
            first, last = max(start, place.start), min(start + len(flat), place.stop)
            if first < last:
                here = slice(first - place.start, last - place.start)
                flat[first - start : last - start] = _sum_in_order([part[here] for part in parts])
        return result

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what each rank has for this one: [ranks, ...], by the rank that gives it.

        tensor: [ranks, ...] of one shape on all ranks, by the rank that it is for.
        """
        if self.world_size == 1:
            return tensor
        tensor = tensor.contiguous()
        result = torch.empty_like(tensor)
        flat = result.view(self.world_size, -1)
        start = self.rank_in_group * flat.shape[1]
        for place, parts in self._open.exchange(tensor):
            first, last = max(start, place.start), min(start + flat.shape[1], place.stop)
            if first < last:
                here = slice(first - place.start, last - place.start)
                for own, part in zip(flat, parts, strict=True):
                    own[first - start : last - start] = part[here]
        return result

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the ranks' rows one after another. counts: how many each rank has."""
        if self.world_size == 1:
            return rows
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: len(rows)] = rows
        if not len(padded):
            return rows
        parts = self.all_gather(padded[None], 0)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    @property
    def _open(self) -> Communicator:
        assert self.communicator is not None, "this process takes no part in the group"
        return self.communicator


def _sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total


class PartsOfStage(NamedTuple):
    """The groups of one rank within its stage."""

    tensor: GroupCoordinator
    """The ranks that each hold a slice of every layer."""
    prefill: GroupCoordinator
    """The ranks that hold the same slices and share the tokens of a step."""
    decode: GroupCoordinator
    """The ranks of :attr:`tensor` that spread cached tokens."""
    context: GroupCoordinator
    """All ranks over which cached tokens are spread."""


ALONE = GroupCoordinator(rank_in_group=0, world_size=1)


class _Current(threading.local):
    stage_group = ALONE
    links = NO_LINKS


_current = _Current()


@contextmanager
def use_groups(stage_group: GroupCoordinator, links: PipelineLinks = NO_LINKS) -> Iterator[None]:
    """Make these the group of the stage's ranks and the links of the layers that are made or run
    inside the block, on this thread."""
    previous = _current.stage_group, _current.links
    _current.stage_group, _current.links = stage_group, links
    try:
        yield
    finally:
        _current.stage_group, _current.links = previous


def use_groups_everywhere(stage_group: GroupCoordinator, links: PipelineLinks) -> None:
    """Make these the group and the links of all threads of a process that serves one engine only:
    threads of connectors ask for their rank."""
    _Current.stage_group, _Current.links = stage_group, links


def get_pipeline_links() -> PipelineLinks:
    """Return this process's links to other pipeline stages."""
    return _current.links


def get_stage_group() -> GroupCoordinator:
    """Return the group of all ranks that have the layers of this one's pipeline stage."""
    return _current.stage_group


def get_tp_group() -> GroupCoordinator:
    """Return the group of the ranks that each hold a slice of every layer."""
    return _current.stage_group.parts.tensor


def get_pp_group() -> GroupCoordinator:
    """Return the group of the ranks that each hold some of the layers.

    It has no collective operations: streams go from one stage to the next.
    """
    links = get_pipeline_links()
    return GroupCoordinator(links.stage, links.num_stages)


def get_world_group() -> GroupCoordinator:
    """Return the group of all ranks of an engine; collective operations work without stages."""
    group, links = get_stage_group(), get_pipeline_links()
    if links.num_stages == 1:
        return group
    rank = links.stage * group.world_size + group.rank_in_group
    return GroupCoordinator(rank, links.num_stages * group.world_size)


def values_of_all_ranks(value: T) -> list[T]:
    """Return the values of all ranks of an engine, in their order; all of them call this with one
    that can be pickled."""
    group, links = get_stage_group(), get_pipeline_links()
    values = [group.broadcast_object(value, rank) for rank in range(group.world_size)]
    if links.before is not None:
        values = [*links.before.receive()[0], *values]
    if links.after is not None:
        links.after.send(values, [])
        assert links.tokens_from is not None
        return list(links.tokens_from.receive()[0])
    for link in links.tokens_to:
        link.send(values, [])
    return values


@contextmanager
def fails_on_all_ranks() -> Iterator[None]:
    """Let a block that all ranks of an engine run fail on all of them if it fails on one."""
    try:
        yield
    except Exception as error:
        values_of_all_ranks(str(error) or type(error).__name__)
        raise
    for problem in values_of_all_ranks(""):
        if problem:
            raise GroupClosedError(f"it failed on another rank: {problem}")


def get_dp_group() -> GroupCoordinator:
    """Return the group of the ranks that each serve other requests: one rank."""
    return ALONE


def get_dcp_group() -> GroupCoordinator:
    """Return the group of the tensor-parallel ranks that each hold a part of the cached tokens."""
    return _current.stage_group.parts.decode


def get_pcp_group() -> GroupCoordinator:
    """Return the group of the ranks with the same weights that share the tokens of a step."""
    return _current.stage_group.parts.prefill


def get_context_group() -> GroupCoordinator:
    """Return the group of all ranks that each hold a part of the cached tokens: those of
    :func:`get_dcp_group` for each rank of :func:`get_pcp_group`."""
    return _current.stage_group.parts.context


def any_rank(flags: torch.Tensor) -> torch.Tensor:
    """Return for each flag, bool [flags], whether a rank of the engine has set it.

    All ranks call this in the same place of a step, after their pass; it waits for all of them.
    """
    links = get_pipeline_links()
    flags = get_stage_group().all_reduce(flags.to(torch.float32)) > 0
    if links.before is not None:
        flags = flags | links.before.receive()[1][0]
    if links.after is not None:
        links.after.send(None, [flags])
    if links.tokens_from is not None:
        flags = links.tokens_from.receive()[1][0]
    for link in links.tokens_to:
        link.send(None, [flags])
    return flags


def get_tensor_model_parallel_rank() -> int:
    return get_tp_group().rank_in_group


def get_tensor_model_parallel_world_size() -> int:
    return get_tp_group().world_size


def get_decode_context_model_parallel_rank() -> int:
    return get_dcp_group().rank_in_group


def get_decode_context_model_parallel_world_size() -> int:
    return get_dcp_group().world_size


def tensor_model_parallel_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``tensor`` over the tensor-parallel ranks."""
    return get_tp_group().all_reduce(tensor)


def tensor_model_parallel_all_gather(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return the slices of the tensor-parallel ranks, concatenated along ``dim``."""
    return get_tp_group().all_gather(tensor, dim)
