"""The memory promised to a step on a card suffices: torch takes it in segments, for each stream."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from vllm.platforms.cuda import CudaPlatform

MIB = 2**20
SMALL, LARGE = 2 * MIB, 20 * MIB


class Allocator:
    """Torch's caching allocator as far as its documentation goes.

    Up to 1 MiB tensors share segments of 2 MiB, up to 10 MiB those of 20 MiB, larger ones have
    segments of their own, in multiples of 2 MiB. A segment stays with its stream.
    """

    def __init__(self) -> None:
        self.segments: dict[tuple[int, int], list[int]] = {}
        """(stream, segment size) -> bytes in use of each."""
        self.reserved = self.peak = self.allocated = self.allocated_peak = 0

    def allocate(self, stream: int, num_bytes: int) -> Callable[[], None]:
        num_bytes = -(-num_bytes // 512) * 512
        size = SMALL if num_bytes <= MIB else LARGE
        if num_bytes > 10 * MIB:
            size = num_bytes = -(-num_bytes // SMALL) * SMALL
        segments = self.segments.setdefault((stream, size), [])
        for index, used in enumerate(segments):  # noqa: B007
            if used + num_bytes <= size:
                break
        else:
            index = len(segments)
            segments.append(0)
            self.reserved += size
            self.peak = max(self.peak, self.reserved)
        segments[index] += num_bytes
        self.allocated += num_bytes
        self.allocated_peak = max(self.allocated_peak, self.allocated)

        def free() -> None:
            segments[index] -= num_bytes
            self.allocated -= num_bytes

        return free

    def empty_cache(self) -> None:
        for (_, size), segments in self.segments.items():
            self.reserved -= size * segments.count(0)
            segments[:] = [used for used in segments if used]

    def reset_peaks(self) -> None:
        self.peak, self.allocated_peak = self.reserved, self.allocated


def run_step(allocator: Allocator, draw: random.Random) -> None:
    """The same tensors on two streams, in any order, all there at once at the end."""
    tensors = [(0, size) for size in (3_000, 700_000, 4 * MIB, 9 * MIB, 33 * MIB + 1)] * 3
    tensors += [(1, size) for size in (16, 900_000, 2 * MIB, 12 * MIB)] * 2
    draw.shuffle(tensors)
    frees = []
    for stream, size in tensors:
        frees.append(allocator.allocate(stream, size))
        if draw.random() < 0.3:  # and something short-lived of the same kind
            allocator.allocate(stream, size // 2)()
    for free in frees:
        free()


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """The device's allocator, after something else has come and gone."""
    allocator = Allocator()
    for name, value in (
        ("synchronize", lambda: None),
        ("empty_cache", allocator.empty_cache),
        ("memory_reserved", lambda: allocator.reserved),
        ("memory_allocated", lambda: allocator.allocated),
        ("max_memory_reserved", lambda: allocator.peak),
        ("max_memory_allocated", lambda: allocator.allocated_peak),
        ("reset_peak_memory_stats", allocator.reset_peaks),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    run_step(allocator, random.Random(0))
    return allocator


@pytest.mark.parametrize("seed", range(50))
def test_what_is_promised_fits(seed: int, allocator: Allocator) -> None:
    draw = random.Random(seed)
    promised = CudaPlatform().measure_peak_bytes(lambda: run_step(allocator, draw))
    allocator.empty_cache()
    allocator.reset_peaks()
    for _ in range(10):
        run_step(allocator, draw)
    assert allocator.peak <= promised


def test_each_stream_may_need_one_more_segment_of_each_size(allocator: Allocator) -> None:
    """As it was measured 7, 7 and 6 parts fill one; with two sixes in one it holds one 7 beside."""
    tensors = [
        (stream, parts * unit)
        for stream in (0, 1)
        for unit in (MIB // 10 // 512 * 512, MIB)
        for parts in (7, 7, 6, 7, 7, 6)
    ]

    def run() -> None:
        for free in [allocator.allocate(*tensor) for tensor in tensors]:
            free()

    promised = CudaPlatform().measure_peak_bytes(run)
    for seed in range(50):
        random.Random(seed).shuffle(tensors)
        run()
    assert allocator.peak == promised
