"""Bundles: blocks that are one content under one key."""

from __future__ import annotations

from vllm.v1.core.block_pool import BlockPool

KEY = (0, b"prefix", 0)


def pool_with_cached_bundle(num_others: int = 0) -> BlockPool:
    """4 blocks and the null block: 1, 2, 3 are a cached bundle, then others are cached."""
    pool = BlockPool(5)
    blocks = pool.allocate(3)
    assert blocks == [1, 2, 3]
    pool.register_bundle(blocks, KEY)
    pool.release(blocks)
    for index in range(num_others):
        (block,) = pool.allocate(1)
        pool.register(block, (1, b"other", index))
        pool.release([block])
    pool.check_integrity({})
    return pool


def test_a_bundle_is_found_held_and_let_go_as_a_whole() -> None:
    pool = pool_with_cached_bundle()
    assert pool.num_free_blocks == 4 and pool.num_idle_blocks == 1
    first = pool.find(KEY)
    assert first is not None and pool.bundle(first) == [1, 2, 3]
    pool.acquire([1, 2, 3])
    assert pool.num_free_blocks == 1
    pool.check_integrity({1: 1, 2: 1, 3: 1})
    pool.release([1, 2, 3])
    assert pool.num_free_blocks == 4 and pool.find(KEY) == 1
    pool.check_integrity({})


def test_overwriting_one_block_of_a_bundle_loses_all_of_it() -> None:
    pool = pool_with_cached_bundle(num_others=1)
    lost: list[int] = []
    pool.on_recycle = lost.extend
    (block,) = pool.allocate(1)  # the bundle was not used for the longest time
    assert block == 1 and lost == [1, 2, 3] and pool.find(KEY) is None
    assert pool.num_idle_blocks == 2 and pool.num_free_blocks == 3
    pool.check_integrity({1: 1})
    assert len(pool.allocate(3)) == 3
    assert pool.num_free_blocks == 0


def test_what_is_older_than_all_bundles_is_overwritten_before_memory_is_touched() -> None:
    pool = BlockPool(10)
    older = pool.allocate(2)
    for index, block in enumerate(older):
        pool.register(block, (1, b"older", index))
    pool.release(older)
    assert pool.allocate(1) == [3]  # there is no bundle: all of it may be of use
    bundle = pool.allocate(2)
    pool.register_bundle(bundle, KEY)
    pool.release(bundle)
    (newer,) = pool.allocate(1)
    assert newer == older[0] and pool.find((1, b"older", 0)) is None
    pool.register(newer, (1, b"newer", 0))
    pool.release([newer])
    assert pool.allocate(3) == [older[1], 6, 7]  # what came after the bundle stays
    assert pool.find(KEY) == bundle[0] and pool.find((1, b"newer", 0)) == newer
    assert len(pool.allocate(2)) == 2
    assert pool.num_idle_blocks == 0 and pool.find(KEY) == bundle[0]
    pool.check_integrity()


def test_a_held_bundle_that_is_forgotten_falls_apart() -> None:
    pool = pool_with_cached_bundle()
    pool.acquire([1, 2, 3])
    pool.forget_all()
    pool.check_integrity({1: 1, 2: 1, 3: 1})
    pool.release([2, 1, 3])
    assert pool.num_idle_blocks == 4 and pool.find(KEY) is None
    pool.check_integrity({})


def test_the_first_bundle_of_a_content_keeps_the_key() -> None:
    pool = pool_with_cached_bundle()
    (other,) = pool.allocate(1)
    pool.register_bundle([other], KEY)
    pool.release([other])
    assert pool.find(KEY) == 1 and pool.num_idle_blocks == 1
    pool.check_integrity({})


def test_states_stay_on_their_side_of_the_pool() -> None:
    """Short requests hold states that they never write: their memory is not touched."""
    pool = BlockPool(60)
    touched: set[int] = set()
    states: set[int] = set()
    late: list[int] = []
    for round_number in range(10):
        requests = []
        for _ in range(4):
            tokens = pool.allocate(1) + pool.allocate(1)
            requests.append((tokens, pool.allocate(5, for_states=True)))
            touched.update(tokens)
            states.update(requests[-1][1])
        for tokens, running in requests[round_number % 4 :] + requests[: round_number % 4]:
            pool.release(running)
            pool.release(tokens[:1])
            pool.release(late)  # rows that were on their way out of the pool
            late = tokens[1:]
        pool.check_integrity()
    assert touched == set(range(1, 10))
    assert states == set(range(40, 60))


def test_a_side_that_is_full_takes_from_the_other_one() -> None:
    pool = BlockPool(11)
    states = pool.allocate(4, for_states=True)
    assert states == [7, 8, 9, 10]
    assert pool.allocate(6) == [1, 2, 3, 4, 5, 6]
    pool.release([8, 9])
    assert pool.num_free_blocks == pool.num_idle_blocks == 2
    assert pool.allocate(1) == [9]
    pool.release([2, 9])
    pool.check_integrity()
    assert pool.allocate(3, for_states=True) == [9, 8, 2]
    pool.release([1, 2])
    pool.check_integrity()
    assert pool.allocate(2) == [2, 1]
    assert pool.num_free_blocks == 0
