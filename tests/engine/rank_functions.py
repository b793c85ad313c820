"""Functions that tests call with the workers of all ranks."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_context_group,
    get_pp_group,
    get_tp_group,
    get_world_group,
)
from vllm.forward_context import current_shared_tokens
from vllm.model_executor.layers import shared_tokens
from vllm.model_executor.layers.attention import spread_attention
from vllm.model_executor.layers.experts import Experts
from vllm.model_executor.models import decoder_block, decoder_loop, decoder_model
from vllm.v1.worker import step_adapters, weight_updates

_MAKE_SHARES: tuple[Any, Any] = (
    shared_tokens.own_tokens,
    GroupCoordinator.reduce_scatter_rows,
)


def poison(worker: Any) -> None:
    """Fill the pool of a rank with NaN."""
    worker.model_runner.pool.fill_(-1)


def poison_padding(worker: Any, *, begins: bool = True) -> None:
    """Fill rows of shared tokens that are behind the last token with NaN, until it ends."""

    def poisoned(make: Any) -> Any:
        def share(*args: torch.Tensor) -> torch.Tensor:
            values, num_tokens = make(*args), current_shared_tokens()
            if not num_tokens:
                return values
            ranks = shared_tokens.sharing_group()
            behind = max(0, num_tokens - ranks.rank_in_group * ranks.share_of_rows(num_tokens))
            values = values.clone()
            values[behind:] = math.nan if values.is_floating_point() else 0
            return values

        return share

    own_tokens, reduce = _MAKE_SHARES
    if begins:
        own_tokens, reduce = poisoned(own_tokens), poisoned(reduce)
    for module in (shared_tokens, decoder_block, decoder_loop, decoder_model):
        vars(module)["own_tokens"] = own_tokens
    GroupCoordinator.reduce_scatter_rows = reduce


def pid(worker: Any) -> int:
    return os.getpid()


def rank(worker: Any) -> int:
    number: int = worker.vllm_config.parallel_config.rank
    return number


def groups(worker: Any) -> tuple[tuple[int, int], ...]:
    """Rank and size of the groups that layers and connectors ask for."""
    found = (get_tp_group(), get_pp_group(), get_world_group())
    return tuple((one.rank_in_group, one.world_size) for one in found)


def context_group(worker: Any) -> tuple[int, int, float]:
    """Rank and size of the group that spreads cached tokens, and a sum over it."""
    group = get_context_group()
    total = float(group.all_reduce(torch.ones(1)))
    return group.rank_in_group, group.world_size, total


def set_part_bytes(worker: Any, num_bytes: int) -> int:
    """Limit the parts of an attention that a rank computes at a time; returns the limit before."""
    before = spread_attention.MOST_PART_BYTES
    spread_attention.MOST_PART_BYTES = num_bytes
    return before


def parameter_bytes(worker: Any) -> int:
    parameters = worker.model_runner.model.parameters()
    return sum(one.nbytes for one in parameters if not one.is_meta)


def own_bytes(worker: Any) -> int:
    """Memory of this process that belongs to no file and that no other process has."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if "Pss_Anon:" in line)


def note_steps(worker: Any) -> None:
    """Note from now on when this rank begins with a step."""
    runner = worker.model_runner
    execute_model, worker.step_times = runner.execute_model, []

    def noted(scheduled: Any) -> Any:
        if scheduled.total_num_scheduled_tokens:
            worker.step_times.append(time.monotonic())
        return execute_model(scheduled)

    runner.execute_model = noted


def noted_steps(worker: Any) -> list[float]:
    times: list[float] = worker.step_times
    return times


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
    worker: Any, failing_rank: int, error: type[BaseException] = MemoryError, num_passes: int = 1
) -> None:
    """Let one rank raise in the second layer that it has in its next pass, or in a later one."""
    if rank(worker) != failing_rank:
        return
    layer, passes = _second_layer(worker), iter(range(num_passes - 1))

    def fail(*_: Any) -> None:
        if next(passes, None) is None:
            handle.remove()
            raise error("planted")

    handle = layer.register_forward_pre_hook(fail)


def fail_on_engine(worker: Any, engine: int, rank_in_engine: int = 0) -> None:
    """Let one rank of one engine raise in its next pass."""
    if worker.vllm_config.parallel_config.data_parallel_rank == engine:
        fail_in_next_pass(worker, rank_in_engine)


def own_experts(worker: Any) -> int:
    """Return how many experts of a layer a rank has."""
    mixtures = (m for m in worker.model_runner.model.modules() if isinstance(m, Experts))
    return len(next(mixtures).own)


def break_weights(worker: Any, engine: int) -> None:
    """Leave the weights of one engine half written."""
    if worker.vllm_config.parallel_config.data_parallel_rank == engine:
        worker._weights.problem = "planted"


def hang_in_next_pass(worker: Any, hanging_rank: int) -> None:
    if rank(worker) != hanging_rank:
        return
    _second_layer(worker).register_forward_pre_hook(lambda *_: time.sleep(3600))


def sleep_in_every_pass(worker: Any, seconds: float) -> None:
    """Let each rank sleep in the second layer that it has."""
    _second_layer(worker).register_forward_pre_hook(lambda *_: time.sleep(seconds))


def model_class(worker: Any) -> str:
    found = type(worker.model_runner.model)
    return f"{found.__module__}.{found.__qualname__}"


def adapter_names(worker: Any) -> list[str]:
    """Return the names of the adapters in memory, the least recently used first."""
    return [one.lora_name for one in worker.model_runner.adapters._loaded]


def waiting_adapters(worker: Any) -> int:
    return len(worker.model_runner.adapters._waiting)


def adapter_elements(worker: Any) -> int:
    """Return the numbers that a rank holds of all adapters, each matrix once."""
    found = {}
    for adapter in worker.model_runner.adapters._loaded.values():
        for part in (one for parts in adapter.parts.values() for one in parts):
            for weight in (one for one in part if hasattr(one, "multiply")):
                found[id(weight)] = math.prod(weight.shape)
    return sum(found.values())


def fail_to_read_adapter(worker: Any, failing_rank: int) -> None:
    """Let one rank fail to read the next adapter."""
    if rank(worker) != failing_rank:
        return
    read = step_adapters.load_adapter

    def fail(*_: Any) -> None:
        step_adapters.load_adapter = read
        raise OSError("planted")

    step_adapters.load_adapter = fail


def fail_in_next_update(worker: Any, failing_rank: int) -> None:
    """Let one rank run out of memory when it writes the next new weights."""
    if rank(worker) != failing_rank:
        return
    model = worker.model_runner.model
    load_weights = model.load_weights

    def fail(weights: Any) -> None:
        model.load_weights = load_weights
        raise MemoryError("planted")

    def rehearse(weights: Any) -> Any:
        model.load_weights = fail
        return load_weights(weights)

    model.load_weights = rehearse


def _second_layer(worker: Any) -> Any:
    return _layers(worker)[worker.model_runner.pipeline.stage.first_layer + 1]


def _layers(worker: Any) -> Any:
    """The decoder layers of a model of ours, or of a module of transformers."""
    model = worker.model_runner.model
    return model.boundaries.layers if hasattr(model, "boundaries") else model.model.layers


def has_computed(worker: Any) -> bool:
    """Return whether the pool has keys and values of some token, besides those of warming up."""
    return bool(worker.model_runner.pool[1:].any())


def hide_files_from(worker: Any, process: int, folder: str) -> None:
    """Let one process find no weights in a folder, as on a machine that does not have it."""
    find = weight_updates.find_weight_files

    def find_others(path: Path, load_format: str) -> list[Path]:
        if str(path) == folder:
            raise ValueError(f"{folder} is not here")
        return find(path, load_format)

    if os.getpid() == process:
        weight_updates.find_weight_files = find_others


def modules(worker: Any) -> set[str]:
    return set(sys.modules)
