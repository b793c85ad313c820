"""Ranks and stages together, of every kind of model: chunks, prefix hits, preemption and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    greedy,
    random_prompts,
    rows_of,
)
from tests.models.checkpoints import make_checkpoint
from tests.models.oracle import relative_error
from tests.models.stored_formats import FORMATS, quantise_checkpoint
from vllm import LLM

pytestmark = pytest.mark.exhaustive

LAYERS: list[int | str] = [0, 2, 4, "norm"]
FIRST, *OTHERS = random_prompts(7, [61, 5, 34, 17])
PROMPTS = [FIRST, *OTHERS, {"prompt_token_ids": [*FIRST["prompt_token_ids"][:48], 9, 8, 7]}]
OPTIONS: dict[str, Any] = {
    "max_model_len": 96,
    "kv_cache_memory_bytes": 2**24,
    "max_num_batched_tokens": 32,
}
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
    "pp": {"pipeline_parallel_size": 2},
    "tp pp": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dcp": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
}
ONE_HEAD = {"num_key_value_heads": 1}
ALL = [
    *((model, ranks) for model in MODELS for ranks in ("tp", "pp", "tp pp")),
    ("experts", "ep"),
    ("dense", "dcp"),
    ("latent", "dcp"),
]


class Results(NamedTuple):
    together: list[torch.Tensor]
    """Rows of prompts that share steps, in chunks."""
    alone: torch.Tensor
    hit: torch.Tensor
    num_cached: int
    preempted: list[torch.Tensor]
    tokens: list[list[int]]


def preempt_often(llm: LLM) -> Iterator[None]:
    """Let a seventh of all allocations fail."""
    manager = core_of(llm).scheduler.kv_cache_manager
    allocate, calls = manager.allocate, iter(range(10**6))
    manager.allocate = lambda *a, **k: next(calls) % 7 != 6 and allocate(*a, **k)
    yield
    manager.allocate = allocate


def run(checkpoint: Path, folder: Path, **options: Any) -> Results:
    files = extraction_config(LAYERS, folder)
    with engine(checkpoint, **OPTIONS, **files, **options) as llm:
        llm.collective_rpc(rank_functions.poison)
        (alone,) = llm.generate(PROMPTS[:1], greedy(), use_tqdm=False)
        (hit,) = llm.generate(PROMPTS[-1:], greedy(), use_tqdm=False)
        llm.reset_prefix_cache()
        together = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        llm.reset_prefix_cache()
        preempting = preempt_often(llm)
        next(preempting)
        preempted = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        next(preempting, None)
        assert core_of(llm).scheduler._totals.num_preemptions
    assert hit.num_cached_tokens is not None
    return Results(
        [rows_of(output) for output in together],
        rows_of(alone),
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
    checkpoint = make_checkpoint(tmp_path / "checkpoint", family, **config)
    if stored is not None:
        checkpoint = quantise_checkpoint(checkpoint, FORMATS[stored]).stored
    one = run(checkpoint, tmp_path / "one", **options)
    several = run(checkpoint, tmp_path / "several", **options, **RANKS[ranks])
    for found in (one, several):
        prompt = len(found.alone)
        assert torch.equal(found.alone, found.together[0][:prompt])
        assert torch.equal(found.hit, found.together[-1][: len(found.hit)])
        assert 0 < found.num_cached <= 48
        assert all(map(torch.equal, found.preempted, found.together))
    assert several.tokens == one.tokens
    for ours, whole in zip(several.together, one.together, strict=True):
        for column in range(len(LAYERS)):
            away = relative_error(ours[:, column], whole[:, column])
            assert away <= (0.0 if ranks == "pp" else MOST_ERROR)
