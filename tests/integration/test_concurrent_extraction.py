"""Many extraction requests at a time over HTTP, short and long: right, and about as fast."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.harness import greedy, random_prompts, rows_of
from tests.grids import at_night
from tests.integration.launcher import engine_options, make_verifier, serve
from vllm import LLM


async def ask_all(url: str, prompts: list[Any]) -> list[dict[str, Any]]:
    """The replies' kv_transfer_params, all prompts asked for at once."""
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client:

        async def ask(prompt: dict[str, Any]) -> dict[str, Any]:
            body = {"prompt": prompt["prompt_token_ids"], "max_tokens": 1, "temperature": 0}
            reply = await client.post("/v1/completions", json=body)
            params: dict[str, Any] = reply.raise_for_status().json()["kv_transfer_params"]
            return params

        return await asyncio.gather(*(ask(prompt) for prompt in prompts))


@pytest.mark.parametrize(
    ("family", "num_requests", "longest"),
    [
        ("qwen3_5", 16, 200),
        at_night("qwen3_5", 32, 400),
        at_night("qwen3_5", 64, 2000),
        at_night("llama", 64, 2000),
    ],
)
def test_concurrent_requests(
    family: str, num_requests: int, longest: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_verifier(tmp_path / "model", family)
    rng = random.Random(11)
    lengths = [1, 2, longest, *(rng.randint(1, longest) for _ in range(num_requests - 3))]
    prompts = random_prompts(12, lengths)
    warm_up = random_prompts(13, lengths)
    with LLM(str(model), **engine_options(tmp_path / "reference")) as llm:
        llm.generate(warm_up, greedy(1), use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, greedy(1), use_tqdm=False)
        offline_seconds = time.perf_counter() - start
        expected = [rows_of(output) for output in outputs]
    with serve(model, tmp_path / "storage") as server:
        asyncio.run(ask_all(server.url, warm_up))
        start = time.perf_counter()
        replies = asyncio.run(ask_all(server.url, prompts))
        http_seconds = time.perf_counter() - start
    for prompt, params, rows in zip(prompts, replies, expected, strict=True):
        tensors = load_file(params["hidden_states_path"])
        assert tensors["token_ids"].tolist() == prompt["prompt_token_ids"]
        assert torch.equal(tensors["hidden_states"], rows)
    tokens = sum(lengths)
    with capsys.disabled():
        print(
            f"\n{family}: {tokens} tokens; offline {tokens / offline_seconds:,.0f}/s, "
            f"HTTP {tokens / http_seconds:,.0f}/s, ratio {offline_seconds / http_seconds:.2f}"
        )
