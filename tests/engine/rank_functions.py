"""Functions that tests call with the workers of all ranks."""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group


def poison(worker: Any) -> None:
    """Fill the pool of a rank with NaN."""
    worker.model_runner.pool.fill_(-1)


def pid(worker: Any) -> int:
    return os.getpid()


def rank(worker: Any) -> int:
    number: int = worker.vllm_config.parallel_config.rank
    return number


def groups(worker: Any) -> tuple[tuple[int, int], ...]:
    """Rank and size of the groups that layers and connectors ask for."""
    found = (get_tp_group(), get_pp_group(), get_world_group())
    return tuple((one.rank_in_group, one.world_size) for one in found)


def parameter_bytes(worker: Any) -> int:
    parameters = worker.model_runner.model.parameters()
    return sum(one.nbytes for one in parameters if not one.is_meta)


def count_layers(worker: Any) -> None:
    """Count from now on how often a rank runs each layer."""
    counts = worker.layer_counts = {}

    def count(layer_id: int) -> Any:
        def add(*_: Any) -> None:
            counts[layer_id] = counts.get(layer_id, 0) + 1

        return add

    for layer_id, layer in enumerate(_layers(worker)):
        layer.register_forward_pre_hook(count(layer_id))


def layers_run(worker: Any) -> list[int]:
    """Return the layers that ran since, and forget them."""
    found = sorted(worker.layer_counts)
    worker.layer_counts.clear()
    return found


def fail_in_next_pass(
    worker: Any, failing_rank: int, error: type[BaseException] = MemoryError
) -> None:
    """Let one rank raise in the second layer that it has in its next pass."""
    if rank(worker) != failing_rank:
        return
    layer = _second_layer(worker)

    def fail(*_: Any) -> None:
        handle.remove()
        raise error("planted")

    handle = layer.register_forward_pre_hook(fail)


def hang_in_next_pass(worker: Any, hanging_rank: int) -> None:
    if rank(worker) != hanging_rank:
        return
    _second_layer(worker).register_forward_pre_hook(lambda *_: time.sleep(3600))


def _second_layer(worker: Any) -> Any:
    return _layers(worker)[worker.model_runner.pipeline.stage.first_layer + 1]


def _layers(worker: Any) -> Any:
    """The decoder layers of a model of ours, or of a module of transformers."""
    model = worker.model_runner.model
    return model.boundaries.layers if hasattr(model, "boundaries") else model.model.layers


def has_computed(worker: Any) -> bool:
    """Return whether the pool has keys and values of some token, besides those of warming up."""
    return bool(worker.model_runner.pool[1:].any())
