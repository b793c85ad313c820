"""Plain data of a step: the division of its tokens into requests, and the places of states."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm.ops.operation import TensorStruct


@dataclass(frozen=True)
class SequenceLayout(TensorStruct):
    """The division of the flat batch into requests.

    ``query_start``: int32 [requests + 1], first token of each request in the batch.
    ``seq_lens``: int32 [requests], tokens of each request after this step (context
    and query). So the first query of request r has the absolute position
    ``seq_lens[r] - (query_start[r + 1] - query_start[r])``.
    """

    operator_tensors = ("query_start", "seq_lens")

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int
    query_start_host: torch.Tensor | None = None
    seq_lens_host: torch.Tensor | None = None
    """Copies on the host, for kernels that plan there."""
    is_recorded: bool = False
    """True if the step is recorded, to be replayed with other lengths: no plan may use these."""

    def on_host(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``query_start`` and ``seq_lens`` on the host; without copies it waits for the device."""
        if self.query_start_host is None or self.seq_lens_host is None:
            return self.query_start.cpu(), self.seq_lens.cpu()
        return self.query_start_host, self.seq_lens_host

    def check(self) -> None:
        """Part of the contract of every operation that takes one."""
        for tensor in (self.query_start, self.seq_lens):
            assert tensor.dtype is torch.int32 and tensor.is_contiguous()
        assert self.query_start.shape[0] == self.seq_lens.shape[0] + 1


class HostStates(NamedTuple):
    """Parts of a :class:`StatePlan` on the host, for kernels that plan there."""

    block_ids: list[int]
    snapshots: list[list[tuple[int, int]]]
    """For each request, (tokens of this step's chunk, block) in order of tokens."""


@dataclass(frozen=True, eq=False)
class StatePlan(TensorStruct):
    """The blocks of the pool that hold the recurrent states of one group in this step.

    ``block_ids``: int32 [requests]; the state is read from there (if ``has_state[r]``,
    bool [requests]; else it is zeros), and the state after the last token is written
    back there. Snapshots of request r are the entries
    ``snapshot_start[r]:snapshot_start[r + 1]``, in order of tokens: the state after
    ``snapshot_tokens[i]`` tokens of this step's chunk (1 <= n <= chunk length) is
    also written to block ``snapshot_blocks[i]``, which is in no ``block_ids``. All int32.
    ``is_final``: bool [requests]; if set, the state after the last token is not read later
    and need not be written.
    """

    operator_tensors = (
        "block_ids",
        "has_state",
        "snapshot_start",
        "snapshot_tokens",
        "snapshot_blocks",
        "is_final",
    )

    block_ids: torch.Tensor
    has_state: torch.Tensor
    snapshot_start: torch.Tensor
    snapshot_tokens: torch.Tensor
    snapshot_blocks: torch.Tensor
    host: HostStates | None = None
    is_final: torch.Tensor | None = None

    def on_host(self) -> HostStates:
        """Blocks and snapshots on the host; if ``host`` is None this waits for the device."""
        if self.host is not None:
            return self.host
        starts = self.snapshot_start.tolist()
        kept = list(zip(self.snapshot_tokens.tolist(), self.snapshot_blocks.tolist(), strict=True))
        own = [kept[start:end] for start, end in itertools.pairwise(starts)]
        return HostStates(self.block_ids.tolist(), own)

    def check(self) -> None:
        """Part of the contract of every operation that takes one."""
        requests = self.block_ids.shape[0]
        indices = (self.snapshot_start, self.snapshot_tokens, self.snapshot_blocks)
        for tensor in (self.block_ids, *indices):
            assert tensor.dtype is torch.int32 and tensor.is_contiguous()
        assert self.has_state.dtype is torch.bool and self.has_state.shape == (requests,)
        assert self.snapshot_start.shape == (requests + 1,)
        assert self.is_final is None or self.is_final.shape == (requests,)


class RequestTokens(NamedTuple):
    """One request of a step: its tokens in the flat batch, and the blocks of its state."""

    begin: int
    end: int
    block: int
    has_state: bool
    snapshots: list[tuple[int, int]]
    """(tokens of this chunk, block), in order of tokens."""

    def load(self, *caches: torch.Tensor) -> list[torch.Tensor]:
        """Dense copies of the request's states from caches [blocks, ...]; zeros if it has none."""
        dense = torch.contiguous_format
        states = [cache[self.block].clone(memory_format=dense) for cache in caches]
        return states if self.has_state else [state.zero_() for state in states]

    def pieces(self) -> Iterator[slice]:
        """Cut the tokens into pieces whose float32 intermediates are held at once; no value
        depends on their size."""
        for start in range(self.begin, self.end, _PIECE_TOKENS):
            yield slice(start, min(start + _PIECE_TOKENS, self.end))

    def keep(
        self, token: int, caches: Sequence[torch.Tensor], states: Sequence[torch.Tensor]
    ) -> None:
        """Write the states after a token of the flat batch to every block that keeps them."""
        for tokens, block in (*self.snapshots, (self.end - self.begin, self.block)):
            if self.begin + tokens == token + 1:
                for cache, state in zip(caches, states, strict=True):
                    cache[block] = state


_PIECE_TOKENS = 128


def requests_of(layout: SequenceLayout, states: StatePlan) -> Iterator[RequestTokens]:
    """The requests that have tokens in this step, for operations in plain torch."""
    bounds = itertools.pairwise(layout.query_start.tolist())
    plans = zip(*states.on_host(), states.has_state.tolist(), strict=True)
    for (begin, end), (block, snapshots, has_state) in zip(bounds, plans, strict=True):
        if begin < end:
            yield RequestTokens(begin, end, block, has_state, snapshots)


def new_rows_apart(like: torch.Tensor) -> torch.Tensor:
    """New rows [rows, columns] for a kernel that reads the same columns of many rows.

    On the CPU they lie an odd number of cache lines apart: rows at a distance of 4 KiB or a
    multiple would evict each other from a cache.
    """
    rows, columns = like.shape
    if like.device.type != "cpu":
        return like.new_empty((rows, columns))
    line = _CACHE_LINE_BYTES // like.itemsize
    lines = -(-columns // line) | 1
    return like.new_empty_strided((rows, columns), (lines * line, 1))


_CACHE_LINE_BYTES = 64


class StateTensor(NamedTuple):
    """A tensor that a recurrent layer keeps of every request."""

    shape: tuple[int, ...]
    dtype: torch.dtype


PENDING_TOKENS = 16
"""Tokens of a chunk, at absolute positions, in CPU kernels that advance states chunk by chunk:
kChunkTokens of csrc/cpu/chunks.h."""


def check_pending(
    pending: Sequence[torch.Tensor], blocks: int, of_tokens: tuple[StateTensor, ...]
) -> None:
    """Part of the contract of operations with pending tensors: they get all of them, or none."""
    for view, (shape, dtype) in zip(pending, of_tokens if pending else (), strict=True):
        assert view.shape == (blocks, *shape) and view.dtype is dtype and view[0].is_contiguous()
