"""Ranks that exchange tensors: values, order of sums, and ends of a group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from vllm.distributed import communicators, gloo_communicator
from vllm.distributed.communicators import (
    Communicator,
    GroupClosedError,
    SharedMemory,
    SharedMemoryCommunicator,
)
from vllm.distributed.gloo_communicator import GlooCommunicator
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    fails_on_all_ranks,
    get_dcp_group,
    get_decode_context_model_parallel_rank,
    get_decode_context_model_parallel_world_size,
    use_groups,
)
from vllm.distributed.pipeline_links import NO_LINKS, Link
from vllm.ops.ranks import ALL_THERE, LEFT, TIMED_OUT, meet_ranks

Make = Callable[[int], Communicator]
RANKS = 3


def shared_memory(
    generation: int = 1, timeout_seconds: float = 20.0, ranks: int = RANKS, **options: Any
) -> Make:
    memory = SharedMemory(SharedMemory.make_file(ranks), ranks)
    return lambda rank: SharedMemoryCommunicator(
        memory, rank, generation, timeout_seconds, **options
    )


def gloo(timeout_seconds: float = 20.0) -> Make:
    store = HashStore()
    return lambda rank: GlooCommunicator(store, "g", rank, RANKS, timeout_seconds, "127.0.0.1")


def on_all(make: Make, run: Callable[[GroupCoordinator], Any], ranks: int = RANKS) -> list[Any]:
    """Call ``run`` on a thread a rank; returns the results or errors, in the order of ranks."""
    results: list[Any] = [None] * ranks

    def work(rank: int) -> None:
        try:
            results[rank] = run(GroupCoordinator(rank, ranks, make(rank)))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def drawn(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.fixture(params=[shared_memory, gloo])
def make(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Make:
    monkeypatch.setattr(communicators, "PIECE_BYTES", 4096)
    monkeypatch.setattr(gloo_communicator, "PIECE_BYTES", 4096)
    kind: Callable[[], Make] = request.param
    return kind()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_float32_in_the_order_of_ranks(make: Make, dtype: torch.dtype) -> None:
    shapes = [(1, 1), (3, 5), (61, 72), (300, 7)]
    results = on_all(
        make, lambda group: [group.all_reduce(drawn(group.rank, s, dtype)) for s in shapes]
    )
    for i, shape in enumerate(shapes):
        first, second, third = (drawn(rank, shape, dtype).float() for rank in range(RANKS))
        expected = (first + second + third).to(dtype)
        assert all(torch.equal(result[i], expected) for result in results)


@pytest.mark.parametrize("ranks", [4, 5])
def test_sums_of_more_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "PIECE_BYTES", 4096)
    given = [drawn(rank, (61, 72), torch.bfloat16) for rank in range(ranks)]
    results = on_all(shared_memory(ranks=ranks), lambda g: g.all_reduce(given[g.rank]), ranks)
    expected = given[0].float()
    for one in given[1:]:
        expected = expected + one.float()
    assert all(torch.equal(result, expected.to(torch.bfloat16)) for result in results)


@pytest.mark.parametrize("rows", [1, 3, 4, 61, 300])
def test_shares_of_a_sum_are_its_rows(make: Make, rows: int) -> None:
    def run(group: GroupCoordinator) -> list[torch.Tensor]:
        values = drawn(group.rank, (rows, 7, 3), torch.bfloat16)
        share = group.reduce_scatter_rows(values)
        assert len(share) == group.share_of_rows(rows) == -(-rows // RANKS)
        return [group.all_gather(share, 0), group.all_reduce(values)]

    for gathered, whole in on_all(make, run):
        assert torch.equal(gathered[:rows], whole)
        assert not gathered[rows:].any()


def test_other_collectives(make: Make) -> None:
    def run(group: GroupCoordinator) -> Any:
        own = drawn(group.rank, (7, 9), torch.float32)
        group.barrier()
        return (
            group.all_gather(own),
            group.all_gather(own.t(), dim=0),
            group.broadcast(torch.tensor([group.rank, 2**40 + group.rank]), src=1),
            group.broadcast_object({"rank": group.rank, "text": "x" * 5000}, src=2),
        )

    whole = [drawn(rank, (7, 9), torch.float32) for rank in range(RANKS)]
    for wide, tall, ids, value in on_all(make, run):
        assert torch.equal(wide, torch.cat(whole, 1))
        assert torch.equal(tall, torch.cat(whole, 1).t())
        assert ids.tolist() == [1, 2**40 + 1]
        assert value == {"rank": 2, "text": "x" * 5000}


def test_each_rank_has_something_for_each(make: Make) -> None:
    """Pieces of shared memory begin and end inside of what is for a rank."""
    shapes = [(1, 1), (7, 300), (5, 0)]
    given = [
        [drawn(rank, (RANKS, *shape), torch.float32) for shape in shapes] for rank in range(RANKS)
    ]
    found = on_all(make, lambda group: [group.all_to_all(one) for one in given[group.rank]])
    for i in range(len(shapes)):
        whole = torch.stack([of_rank[i] for of_rank in given], 1)
        assert all(torch.equal(result[i], own) for result, own in zip(found, whole, strict=True))


def test_groups_that_spread_tokens_are_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "PIECE_BYTES", 4096)
    memory = SharedMemory(SharedMemory.make_file(4), 4)
    own = [drawn(rank, (2, 999), torch.float32) for rank in range(4)]

    def run(whole: GroupCoordinator) -> Any:
        group = replace(whole, decode_context_parallel_size=2)
        with use_groups(group):
            part = get_dcp_group()
            assert get_decode_context_model_parallel_rank() == part.rank_in_group
            assert get_decode_context_model_parallel_world_size() == part.world_size
        sums, swapped = part.all_reduce(own[whole.rank]), part.all_to_all(own[whole.rank])
        return (part.rank_in_group, part.world_size), sums, swapped

    found = on_all(lambda rank: SharedMemoryCommunicator(memory, rank, 1, 20.0), run, 4)
    for rank, (place, sums, swapped) in enumerate(found):
        first = rank // 2 * 2
        assert place == (rank % 2, 2)
        assert torch.equal(sums, own[first] + own[first + 1])
        assert torch.equal(swapped, torch.stack([own[first][rank % 2], own[first + 1][rank % 2]]))


def test_a_rank_that_leaves_ends_the_calls_of_the_others(make: Make) -> None:
    def run(group: GroupCoordinator) -> None:
        group.barrier()
        assert group.communicator is not None
        if group.rank == 1:
            group.communicator.close()
        group.barrier()

    assert all(isinstance(error, GroupClosedError) for error in on_all(make, run))


def test_a_new_group_in_the_same_memory() -> None:
    memory = SharedMemory(SharedMemory.make_file(RANKS), RANKS)
    for generation in (1, 2):
        make: Make = lambda rank: SharedMemoryCommunicator(memory, rank, generation, 20.0)  # noqa: B023, E731
        sums = on_all(make, lambda group: int(group.all_reduce(torch.tensor([1.0]))))
        assert sums == [3, 3, 3]
        make(0).close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_seconds": 0.3}, r"not come for 0.3 s \(distributed_timeout_seconds\)"),
        ({"are_others_alive": lambda: False}, "has ended"),
    ],
)
def test_a_rank_that_does_not_come(options: dict[str, Any], message: str) -> None:
    start = time.monotonic()
    communicator = shared_memory(**options)(0)
    with pytest.raises(GroupClosedError, match=message):
        list(communicator.exchange(torch.ones(3)))
    assert time.monotonic() - start < 5
    with pytest.raises(GroupClosedError, match="left"):
        list(communicator.exchange(torch.ones(3)))


def test_objects_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_communicator, "PIECE_BYTES", 512)
    values = [None, {"text": "x" * 5000}, torch.arange(300)]

    def run(group: GroupCoordinator) -> Any:
        assert isinstance(group.communicator, GlooCommunicator)
        return group.communicator.gather_objects(values[group.rank])

    for empty, text, tensor in on_all(gloo(), run):
        assert empty is None
        assert text == values[1]
        assert torch.equal(tensor, torch.arange(300))


def test_a_rank_that_does_not_come_over_tcp() -> None:
    def run(group: GroupCoordinator) -> None:
        group.barrier()
        if group.rank == 1:
            time.sleep(1.5)
            return
        group.barrier()

    late, _, other = on_all(gloo(timeout_seconds=0.5), run)
    assert all(isinstance(error, GroupClosedError) for error in (late, other))
    assert "not come for 0.5 s (distributed_timeout_seconds)" in str(late)


@pytest.mark.parametrize("over_tcp", [False, True])
def test_links(*, over_tcp: bool) -> None:
    store, memory = HashStore(), SharedMemory(SharedMemory.make_file(2), 2)

    def make(rank: int) -> Communicator:
        if over_tcp:
            return GlooCommunicator(store, "link", rank, 2, 20.0, "127.0.0.1")
        return SharedMemoryCommunicator(memory, rank, 1, 20.0)

    sent = [drawn(1, (61, 72), torch.bfloat16), torch.empty(0, 3), torch.tensor(2**40)]
    ends: list[Any] = [None, None]

    def run(rank: int) -> None:
        link = Link(make(rank))
        ends[rank] = link.receive() if rank else link.send({"about": "it"}, sent)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    about, tensors = ends[1]
    assert about == {"about": "it"}
    assert all(torch.equal(a, b) for a, b in zip(tensors, sent, strict=True))


@pytest.mark.parametrize("meet", [meet_ranks, meet_ranks.body])
def test_meetings(meet: Callable[..., None]) -> None:
    flags, state = torch.zeros(3, 8, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    meet(flags, 0, 5, 1000, state)
    assert state.item() == TIMED_OUT
    assert flags[:, 0].tolist() == [5, 0, 0]
    flags[1, 0] = 7
    meet(flags, 0, 6, 1000, state)
    assert state.item() == ALL_THERE
    flags[2, 0] = 9
    meet(flags, 0, 7, 1000, state)  # the others are there although one has left
    assert state.item() == ALL_THERE
    meet(flags, 0, 8, 10**6, state)
    assert state.item() == LEFT


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_an_error_without_a_message_fails_on_all_ranks(make: Make, failing_rank: int) -> None:
    """Python's own MemoryError has none."""

    def run(group: GroupCoordinator) -> None:
        with use_groups(group, NO_LINKS), fails_on_all_ranks():
            if group.rank == failing_rank:
                raise MemoryError

    for rank, result in enumerate(on_all(make, run)):
        if rank == failing_rank:
            assert isinstance(result, MemoryError)
        else:
            assert isinstance(result, GroupClosedError) and "MemoryError" in str(result)
