"""Rows that come step by step are those of a whole extraction, also after preemptions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import engine, random_prompts
from vllm import AsyncEngineArgs, AsyncLLM
from vllm.hidden_states import ExtractRequest
from vllm.v1.engine.extraction_settings import ExtractionSettings

PROMPTS = random_prompts(74, [150, 90, 120, 33, 140, 75, 1, 130])
ASKED: list[dict[str, Any]] = [
    {"layers": [1, "norm"], "top_logprobs": 3},
    {"layers": [2], "positions": "every:3", "hooks": ["blocks.1.hook_attn_out"]},
    {"layers": [0, 3], "dtype": "fp8"},
    {"layers": [4], "positions": "last"},
]


async def no_limit(_: int) -> None:
    pass


@pytest.mark.parametrize("pool", ["large", "small"])
def test_parts_make_the_whole(pool: str, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama")
    memory = {"large": 2**24, "small": 220_000}[pool]
    arguments: dict[str, Any] = {"max_model_len": 160, "kv_cache_memory_bytes": memory}
    requests = [
        ExtractRequest(prompt, **ASKED[number % len(ASKED)])
        for number, prompt in enumerate(PROMPTS)
    ]
    with engine(folder) as llm:
        expected = list(llm.extract(requests))

    async def gather(llm: AsyncLLM, request: ExtractRequest) -> tuple[Any, list[Any]]:
        settings = ExtractionSettings(None, "all", None, True, "raise", None)
        parts = await llm.extract_in_parts(request, settings, no_limit)
        assert parts is not None
        return parts.sample, [rows async for rows in parts.rows]

    async def run() -> tuple[list[Any], int]:
        args = AsyncEngineArgs(str(folder), long_prefill_token_threshold=16, **arguments)
        llm = AsyncLLM.from_engine_args(args)
        try:
            found = await asyncio.gather(*(gather(llm, request) for request in requests))
            return list(found), llm.stats.num_preemptions
        finally:
            await llm.shutdown()

    found, preemptions = asyncio.run(run())
    assert (preemptions > 0) == (pool == "small")
    for (sample, parts), right in zip(found, expected, strict=True):
        assert torch.equal(sample.positions, right.positions)
        assert len(parts) > 1 or len(right.token_ids) <= 33 or len(right.positions) == 1
        for name, tensor in right.tensors.items():
            rows = torch.cat([part.tensors[name] for part in parts])
            assert rows.dtype is tensor.dtype
            assert torch.equal(rows.float().nan_to_num(9), tensor.float().nan_to_num(9)), name
