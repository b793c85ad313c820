"""Functions that tests call with the workers of all ranks."""

from __future__ import annotations

import os
import time
from typing import Any


def poison(worker: Any) -> None:
    """Fill the pool of a rank with NaN."""
    worker.model_runner.pool.fill_(-1)


def pid(worker: Any) -> int:
    return os.getpid()


def rank(worker: Any) -> int:
    number: int = worker.vllm_config.parallel_config.rank
    return number


def parameter_bytes(worker: Any) -> int:
    return sum(one.nbytes for one in worker.model_runner.model.parameters())


def fail_in_next_pass(worker: Any, failing_rank: int) -> None:
    """Let one rank raise in the second layer of its next pass."""
    if rank(worker) != failing_rank:
        return
    layer = worker.model_runner.model.model.layers[1]

    def fail(*_: Any) -> None:
        handle.remove()
        raise MemoryError("planted")

    handle = layer.register_forward_pre_hook(fail)


def hang_in_next_pass(worker: Any, hanging_rank: int) -> None:
    if rank(worker) != hanging_rank:
        return
    layer = worker.model_runner.model.model.layers[1]
    layer.register_forward_pre_hook(lambda *_: time.sleep(3600))


def has_computed(worker: Any) -> bool:
    """Return whether the pool has keys and values of some token, besides those of warming up."""
    return bool(worker.model_runner.pool[1:].any())
