"""The ranks of engines that share experts, and what their engines bring to each step.

Before a step all ranks of all engines agree on its size. Then each mixture of experts is a place at
which they exchange tokens and outputs; a rank without tokens takes part all the same.

A rank that fails between the first and the last of these places leaves, which ends the step of all
engines. Then each goes on in the next *generation* of the group, which is complete when all have
come. Generations use two memories in turn, because the last ranks may still be in the one before.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from vllm.distributed.communicators import (
    PIECE_BYTES,
    GroupClosedError,
    SharedMemory,
    SharedMemoryCommunicator,
)
from vllm.exceptions import Failure, FailureError, FailureKind


class EngineFiles:
    """Files without names for the memory of a group, which its ranks open by their paths.

    They exist as long as this object, which belongs to the process that starts the engines.
    """

    def __init__(self) -> None:
        self._files = [os.memfd_create("vllm-engines", 0) for _ in range(3)]
        os.truncate(self._files[-1], mmap.PAGESIZE)
        self.paths = tuple(f"/proc/{os.getpid()}/fd/{file}" for file in self._files)
        """Two memories, and a byte that says whether an engine has ended."""

    def end_group(self) -> None:
        """Let all ranks know that an engine has ended, so that none waits for it."""
        os.pwrite(self._files[-1], b"\1", 0)

    def __del__(self) -> None:
        for file in self._files:
            os.close(file)


class Brought(NamedTuple):
    """The share of one engine in a step."""

    num_tokens: int
    num_layers: int
    """Decoder layers that its pass runs."""
    has_work: bool
    """True if it has requests, or something to report."""
    is_ready: bool
    """False: it sleeps, or its weights are not whole."""


class Rows(NamedTuple):
    """Some rows of a rank, which are valid until the next ones are asked for."""

    rank: int
    start: int
    """Number of the first of them among the rank's rows."""
    rows: torch.Tensor


class EngineGroup:
    """All ranks of the engines, seen from this process; those of an engine follow each other."""

    def __init__(
        self,
        paths: Sequence[str],
        engine: int,
        num_engines: int,
        rank_in_engine: int,
        ranks_per_engine: int,
        timeout_seconds: float,
    ) -> None:
        """paths: those of :class:`EngineFiles`. ValueError: there is not enough memory."""
        self.engine, self.num_engines = engine, num_engines
        self.rank_in_engine, self.ranks_per_engine = rank_in_engine, ranks_per_engine
        self.rank = engine * ranks_per_engine + rank_in_engine
        self.world_size = num_engines * ranks_per_engine
        self.is_engine_alive: Callable[[], bool] = lambda: True
        """Returns whether the other ranks of this engine run."""
        self._has_work = False
        self.step: tuple[Brought, ...] = ()
        """The shares of all engines in the step; empty before they have agreed on it."""
        self._timeout_seconds, self._deadline = timeout_seconds, 0.0
        *memories, end = (os.open(path, os.O_RDWR) for path in paths)
        for file in memories:
            os.truncate(file, SharedMemory.num_bytes(self.world_size))
        self._memories = [SharedMemory(file, self.world_size) for file in memories]
        self._end = mmap.mmap(end, mmap.PAGESIZE)
        for file in (*memories, end):
            os.close(file)
        self._generation = 0
        self._next_place: int | None = None
        self._enter_next_generation()

    def _enter_next_generation(self) -> None:
        self._generation += 1
        self._communicator = SharedMemoryCommunicator(
            self._memories[self._generation % 2],
            self.rank,
            self._generation,
            float("inf"),
            self._check_others,
        )

    def _check_others(self) -> bool:
        """Look, while this rank waits, whether all others can still come."""
        if not self.is_engine_alive():
            raise GroupClosedError("the process of another rank has ended")
        reason = "another engine that has some of the experts has ended"
        if not self._end[0] and time.monotonic() > self._deadline:
            self.end()
            reason = (
                f"another engine that has some of the experts has not come for "
                f"{self._timeout_seconds:g} s (distributed_timeout_seconds)"
            )
        if self._end[0]:
            raise FailureError(Failure(FailureKind.ENGINE_DEAD, reason))
        return True

    def end(self) -> None:
        """End the group: this engine does not come any more."""
        self._end[0] = 1

    # ---- steps

    def prepare_step(self, *, has_work: bool) -> None:
        """Say whether this engine has work at the next step; in an engine's own process."""
        self._has_work, self.step = has_work, ()

    def begin_step(self, num_tokens: int, num_layers: int, *, is_ready: bool) -> None:
        """Wait until all engines begin a step; then :attr:`step` says what they bring.

        FailureError: one of them has ended.
        """
        own = torch.tensor([num_tokens, num_layers, self._has_work, is_ready])
        found: list[list[int]] | None = None
        while found is None:
            try:
                found = [piece.rows[0].tolist() for piece in self.exchange_rows(own[None])]
            except GroupClosedError:
                if not self.is_engine_alive():
                    raise
                self._enter_next_generation()
        size = self.ranks_per_engine
        by_engine = [found[first : first + size] for first in range(0, len(found), size)]
        self.step = tuple(
            Brought(tokens, layers, bool(has_work), all(one[3] for one in ranks))
            for ranks in by_engine
            for tokens, layers, has_work, _ in ranks[:1]
        )
        self._next_place = 0 if self.has_tokens else None

    @property
    def has_tokens(self) -> bool:
        """True if some engine brought tokens to the last step."""
        return any(one.num_tokens for one in self.step)

    @property
    def goes_on(self) -> bool:
        """True if some engine had work at the last step, so that there will be another one."""
        return any(one.has_work for one in self.step)

    @property
    def num_begun(self) -> int:
        """Number of the exchanges of this step that have begun."""
        return self._next_place or 0

    def begin_place(self, place: int, layer: int, num_tokens: int | None = None) -> list[int]:
        """Begin the exchange at a mixture; returns the tokens that each engine brings to it.

        place: its number in the order of a pass; layer: that of its decoder layer. num_tokens: what
        this engine brings, to be checked. RuntimeError: it is not the next one.
        """
        if place != self._next_place:
            raise RuntimeError(
                f"the mixture of experts {place} (layer {layer}) runs in place of "
                f"{self._next_place}: layers whose experts several engines share have to run in "
                "their order, inside a step"
            )
        self._next_place += 1
        counts = [one.num_tokens if layer < one.num_layers else 0 for one in self.step]
        if num_tokens not in (None, counts[self.engine]):
            raise RuntimeError(
                f"layer {layer} has {num_tokens} tokens, but this engine brought "
                f"{counts[self.engine]} to the step"
            )
        return counts

    def end_step(self) -> None:
        """The exchanges of this step are over for this rank."""
        self._next_place = None

    def leave_step(self) -> None:
        """End the step of all engines, because this rank cannot complete its exchanges."""
        if self._next_place is not None:
            self._communicator.close()
        self._next_place = None

    def exchange_rows(
        self, rows: torch.Tensor, counts: Sequence[int] | None = None
    ) -> Iterator[Rows]:
        """Yield the rows of all ranks, [rows, n] of one dtype, by pieces.

        counts: how many each rank has; None: one. GroupClosedError: a rank has left the step.
        """
        counts = counts or [1] * self.world_size
        width = rows.shape[1]
        most = PIECE_BYTES // (width * rows.element_size())
        assert most > 0, "a row does not fit into a piece"
        for start in range(0, max(counts), most):
            size = min(most, max(counts) - start)
            mine = rows[start : start + size]
            if len(mine) < size:
                mine, few = rows.new_empty((size, width)), mine
                mine[: len(few)] = few
            self._deadline = time.monotonic() + self._timeout_seconds
            for _, parts in self._communicator.exchange(mine.contiguous()):
                for rank, part in enumerate(parts):
                    here = min(counts[rank] - start, size)
                    if here > 0:
                        yield Rows(rank, start, part[: here * width].view(here, width))


_of_process: EngineGroup | None = None


def use_engine_group(group: EngineGroup | None) -> None:
    """Make this the group of the engine that this process serves."""
    global _of_process
    _of_process = group


def get_engine_group() -> EngineGroup | None:
    """Return the group of engines that share experts with that of this process; None: none do."""
    return _of_process
