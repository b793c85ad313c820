"""Engines for tests: a poisoned pool, extraction switched on, integrity checked."""

from __future__ import annotations

import gc
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vllm import LLM, SamplingParams
from vllm.outputs import RequestOutput

VOCABULARY = 300


def extraction_config(layers: Sequence[int | str], folder: Path, **extra: Any) -> dict[str, Any]:
    """The arguments of LLM that switch extraction on, as upstream spells them."""
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder), **extra},
        },
    }


@contextmanager
def engine(checkpoint: Path, **arguments: Any) -> Iterator[LLM]:
    """An LLM whose pool is NaN wherever nothing valid is; nothing may be left at the end."""
    arguments = {"max_model_len": 512, "kv_cache_memory_bytes": 2**24, **arguments}
    llm = LLM(str(checkpoint), **arguments)
    poison(llm)
    try:
        yield llm
        check_nothing_is_left(llm)
    finally:
        llm.shutdown()
        del llm
        gc.collect()


def core_of(llm: LLM) -> Any:
    """The engine core of an LLM in this process."""
    return llm.llm_engine.engine_core


def poison(llm: LLM) -> None:
    """Fill the pool with NaN, now and whenever a block loses its content."""
    core = core_of(llm)
    pool = core.executor.worker.model_runner.pool
    pool.fill_(-1)  # all bits set is a NaN in every float type

    def fill(blocks: Sequence[int]) -> None:
        core.executor.run_waiting_steps()  # they still read the blocks
        pool[list(blocks)] = -1

    core.scheduler.kv_cache_manager.pool.on_recycle = fill


@contextmanager
def failing_allocations(llm: LLM, most: float = math.inf) -> Iterator[None]:
    """Let every seventh allocation of blocks fail, ``most`` in all, so that requests are preempted.

    Each running request allocates in each step, also if it has its blocks.
    """
    manager, calls = core_of(llm).scheduler.kv_cache_manager, itertools.count()
    allocate = manager.allocate

    def fail_at_times(*args: Any, **options: Any) -> Any:
        call = next(calls)
        return (call > most * 7 or call % 7 != 6) and allocate(*args, **options)

    manager.allocate, manager.has_blocks = fail_at_times, lambda *_: False
    try:
        yield
    finally:
        del manager.allocate, manager.has_blocks


def check_nothing_is_left(llm: LLM) -> None:
    scheduler = core_of(llm).scheduler
    scheduler.check_integrity()
    assert not scheduler.requests
    pool = scheduler.kv_cache_manager.pool
    assert pool.num_free_blocks == pool.num_blocks - 1, "leaked blocks"


def random_prompts(seed: int, lengths: Sequence[int], vocabulary: int = VOCABULARY) -> list[Any]:
    rng = random.Random(seed)
    return [
        {"prompt_token_ids": [rng.randrange(vocabulary) for _ in range(length)]}
        for length in lengths
    ]


def greedy(max_tokens: int = 1, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)


def with_output_tokens(max_tokens: int) -> SamplingParams:
    return greedy(max_tokens, extra_args={"kv_transfer_params": {"include_output_tokens": True}})


def rows_of(output: RequestOutput) -> torch.Tensor:
    """The file of a reply: [tokens, layers, hidden]; its token ids are checked."""
    assert output.outputs[0].finish_reason != "error", output.outputs[0].stop_reason
    assert output.kv_transfer_params is not None
    tensors = load_file(output.kv_transfer_params["hidden_states_path"])
    assert set(tensors) == {"hidden_states", "token_ids"}
    token_ids = tensors["token_ids"].tolist()
    known = list(output.prompt_token_ids or []) + list(output.outputs[0].token_ids)
    assert token_ids == known[: len(token_ids)]
    assert len(tensors["hidden_states"]) == len(token_ids)
    assert len(token_ids) >= len(output.prompt_token_ids or [])
    return tensors["hidden_states"]
