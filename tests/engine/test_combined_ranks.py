"""Ranks and stages together, of every kind of model: chunks, prefix hits, preemption and files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from tests.engine import rank_functions
from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    failing_allocations,
    greedy,
    random_prompts,
    rows_of,
)
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import relative_error
from tests.models.stored_formats import FORMATS, quantise_checkpoint
from vllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    load_hidden_states,
)
from vllm.outputs import RequestOutput

pytestmark = pytest.mark.exhaustive

LAYERS: list[int | str] = [0, 2, 4, "norm"]
FIRST, *OTHERS = random_prompts(7, [61, 5, 33, 17])
PROMPTS = [FIRST, *OTHERS, {"prompt_token_ids": [*FIRST["prompt_token_ids"][:48], 9, 8, 7]}]
OPTIONS: dict[str, Any] = {
    "max_model_len": 96,
    "kv_cache_memory_bytes": 2**24,
    "max_num_batched_tokens": 32,
}
ALONE = (0, 2)
"""Numbers of prompts; the last chunk of the second has one token."""
MOST_ERROR = 1e-4


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Model(NamedTuple):
    family: str
    config: Mapping[str, Any] = NOTHING
    options: Mapping[str, Any] = NOTHING
    stored: str | None = None


MODELS = {
    "dense": Model("llama"),
    "sliding and full": Model("gemma3"),
    "delta rule": Model("qwen3_5"),
    "mamba": Model("nemotron_h", {"n_groups": 2}),
    "experts": Model("mixtral"),
    "latent": Model("deepseek_v3"),
    "quantised": Model("llama", stored="fp8-channel"),
    "module of transformers": Model("llama", options={"model_impl": "transformers"}),
}
RANKS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_parallel_size": 2},
    "tp 4": {"tensor_parallel_size": 4},
    "pp": {"pipeline_parallel_size": 2},
    "tp pp": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dcp": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "shared tokens": {"tensor_parallel_size": 2, "enable_sequence_parallel": True},
}
ONE_HEAD = {"num_key_value_heads": 1}
EIGHT_HEADS = {"num_attention_heads": 8}
"""With two of keys and values, of which four ranks have two copies each."""
ALL = [
    *((model, ranks) for model in MODELS for ranks in ("tp", "pp", "tp pp")),
    *((model, "shared tokens") for model in MODELS if model != "module of transformers"),
    ("experts", "ep"),
    ("dense", "tp 4"),
    ("dense", "dcp"),
    ("latent", "dcp"),
]


class Results(NamedTuple):
    together: list[torch.Tensor]
    """Rows of prompts that share steps, in chunks."""
    alone: list[torch.Tensor]
    """Rows of prompts by themselves (:data:`ALONE`)."""
    hit: torch.Tensor
    num_cached: int
    preempted: list[torch.Tensor]
    tokens: list[list[int]]


def run(checkpoint: Path, folder: Path, **options: Any) -> Results:
    files = extraction_config(LAYERS, folder)
    with engine(checkpoint, **OPTIONS, **files, **options) as llm:
        llm.collective_rpc(rank_functions.poison)
        alone = llm.generate(PROMPTS[:1], greedy(), use_tqdm=False)
        (hit,) = llm.generate(PROMPTS[-1:], greedy(), use_tqdm=False)
        alone += llm.generate(PROMPTS[2:3], greedy(), use_tqdm=False)
        llm.reset_prefix_cache()
        together = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        llm.reset_prefix_cache()
        with failing_allocations(llm):
            preempted = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        assert core_of(llm).scheduler._totals.num_preemptions
    assert hit.num_cached_tokens is not None
    return Results(
        [rows_of(output) for output in together],
        [rows_of(output) for output in alone],
        rows_of(hit),
        hit.num_cached_tokens,
        [rows_of(output) for output in preempted],
        [list(output.outputs[0].token_ids) for output in together],
    )


@pytest.mark.parametrize(("model", "ranks"), ALL)
def test_ranks_have_the_rows_of_one(model: str, ranks: str, tmp_path: Path) -> None:
    family, config, options, stored = MODELS[model]
    if ranks == "dcp" and model == "dense":
        config = {**config, **ONE_HEAD}
    if ranks == "tp 4":
        config = {**config, **EIGHT_HEADS}
    checkpoint = make_checkpoint(tmp_path / "checkpoint", family, **config)
    if stored is not None:
        checkpoint = quantise_checkpoint(checkpoint, FORMATS[stored]).stored
    one = run(checkpoint, tmp_path / "one", **options)
    several = run(checkpoint, tmp_path / "several", **options, **RANKS[ranks])
    for found in (one, several):
        for number, rows in zip(ALONE, found.alone, strict=True):
            assert torch.equal(rows, found.together[number][: len(rows)])
        assert torch.equal(found.hit, found.together[-1][: len(found.hit)])
        assert 0 < found.num_cached <= 48
        assert all(map(torch.equal, found.preempted, found.together))
    assert several.tokens == one.tokens
    for ours, whole in zip(several.together, one.together, strict=True):
        for column in range(len(LAYERS)):
            away = relative_error(ours[:, column], whole[:, column])
            assert away <= (0.0 if ranks == "pp" else MOST_ERROR)


class Served(NamedTuple):
    """Rows and tokens of prompts that several engines serve, in files."""

    rows: list[torch.Tensor]
    tokens: list[list[int]]
    cached: list[int]


async def serve(llm: AsyncLLM, prompts: list[Any], salt: str, max_tokens: int) -> Served:
    """Send all prompts at once; only those of one salt share prefixes."""

    async def one(number: int, prompt: Any) -> RequestOutput:
        salted: Any = {**prompt, "cache_salt": salt}
        stream = llm.generate(salted, greedy(max_tokens), f"{salt} {number}")
        return [output async for output in stream][-1]

    outputs = await asyncio.gather(*(one(*pair) for pair in enumerate(prompts)))
    return Served(
        [rows_of(output) for output in outputs],
        [list(output.outputs[0].token_ids) for output in outputs],
        [output.num_cached_tokens or 0 for output in outputs],
    )


@pytest.mark.parametrize("model", ["dense", "delta rule", "experts"])
def test_two_engines_of_two_ranks_have_the_rows_of_one(model: str, tmp_path: Path) -> None:
    """In chunks, with prefix hits, after preemptions, from files."""
    family, config, options, _ = MODELS[model]
    checkpoint = make_checkpoint(tmp_path / "checkpoint", family, **config)
    one = run(checkpoint, tmp_path / "one", **options)
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2, "num_gpu_blocks_override": 20}
    files = extraction_config(LAYERS, tmp_path / "several")

    async def served() -> tuple[list[Served], int]:
        args = AsyncEngineArgs(str(checkpoint), **{**OPTIONS, **options, **sizes}, **files)
        llm = AsyncLLM.from_engine_args(args)
        try:
            await llm.start()
            await llm.collective_rpc(rank_functions.poison)
            alone = await serve(llm, PROMPTS[:1], "alone", 1)
            crowded = await serve(llm, PROMPTS * 4, "crowd", 20)
            # Two at once go to both engines, and those after them find their prefix.
            await serve(llm, PROMPTS[:1] * 2, "hits", 1)
            hits = await serve(llm, PROMPTS[-1:] * 2, "hits", 1)
            assert all(await llm.collective_rpc(rank_functions.has_computed))
            return [alone, crowded, hits], llm.stats.num_preemptions
        finally:
            await llm.shutdown()

    (alone, crowded, hits), num_preemptions = asyncio.run(served())
    assert num_preemptions
    assert min(hits.cached) > 0
    first, last = crowded.rows[0], crowded.rows[len(PROMPTS) - 1]
    assert torch.equal(alone.rows[0], first[: len(alone.rows[0])])
    assert all(torch.equal(rows, last[: len(rows)]) for rows in hits.rows)
    for number, rows in enumerate(crowded.rows):
        place = number % len(PROMPTS)
        assert torch.equal(rows, crowded.rows[place])
        assert crowded.tokens[number] == crowded.tokens[place]
        assert crowded.tokens[number][:6] == one.tokens[place]
        for column in range(len(LAYERS)):
            assert relative_error(rows[:, column], one.together[place][:, column]) <= MOST_ERROR


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_upstreams_test_of_two_devices(load_format: str, tmp_path: Path) -> None:
    """Its options and calls, on two processes of a CPU; it tests shapes, this also values."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "qwen3", num_hidden_layers=18)
    prompts = ["Hello world", "Test prompt with several tokens"]
    found: list[tuple[list[Any], list[torch.Tensor]]] = []
    for ranks in (1, 2):
        config = extraction_config([5, 11, 17], tmp_path / str(ranks))
        llm = LLM(
            model=str(checkpoint),
            tensor_parallel_size=ranks,
            **config,
            max_model_len=256,
            enforce_eager=True,
            gpu_memory_utilization=0.4,
            load_format=load_format,
        )
        with llm:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0))
        rows = []
        for output in outputs:
            params: Any = output.kv_transfer_params
            tensors = load_hidden_states(params["hidden_states_path"])
            assert tensors["token_ids"].tolist() == output.prompt_token_ids
            assert tensors["hidden_states"].shape == (len(tensors["token_ids"]), 3, 72)
            rows.append(tensors["hidden_states"])
            assert rows[-1].isfinite().all() and rows[-1].any()
        found.append(([output.outputs[0].token_ids for output in outputs], rows))
    if load_format == "dummy":
        return  # each rank draws its own
    (tokens, expected), (other_tokens, several) = found
    assert tokens == other_tokens
    for whole, ours in zip(expected, several, strict=True):
        for column in range(3):
            assert relative_error(ours[:, column], whole[:, column]) <= MOST_ERROR
